"""Settings that several interfaces share: how tokens are sampled, how an engine is built.

Owns one declaration per setting: name, type, default, range and help text. The command line, HTTP bodies,
`SamplingParams`, `EngineSettings`, the reader of generation_config.json and the tables of the documentation derive
from it. A new setting of sampling is a field of `SamplingSettings` and the code that acts on `Sampling`; nothing else
repeats its name. Imports nothing heavy, because the command line reads the declarations at every start.
"""

from tilewise.settings.declaration import (
    Setting,
    check_settings,
    documented,
    json_type,
    narrowed,
    setting,
    settings_of,
)
from tilewise.settings.engine import EngineSettings, SpeculativeConfig
from tilewise.settings.sampling import OutputOptions, Sampling, SamplingSettings

__all__ = [
    "EngineSettings",
    "OutputOptions",
    "Sampling",
    "SamplingSettings",
    "Setting",
    "SpeculativeConfig",
    "check_settings",
    "documented",
    "json_type",
    "narrowed",
    "setting",
    "settings_of",
]
