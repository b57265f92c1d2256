"""`LLM`: answers lists of prompts with lists of outputs, with vLLM's names. Wraps an `Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise import models
from tilewise.core import Validator
from tilewise.core.progress import Progress
from tilewise.encode import Encoder
from tilewise.generate import ChatTemplate, encode_prompt, served_settings
from tilewise.graph.parallel import ProgressTracker
from tilewise.serve.engine import Engine, Prompt, prompt_form
from tilewise.serve.model import encoder_settings
from tilewise.serve.output_processor import OutputProcessor
from tilewise.serve.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput, RequestOutputKind
from tilewise.serve.sampling_params import SamplingParams

__all__ = ["LLM"]

_validate = Validator("serve")
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams]


class LLM:
    """A model that answers lists of prompts. Thread-safe. Use with `with`, or call `close`.

    Args:
        model: Hugging Face directory (config.json, weights, tokenizer files).
        **settings: fields of `EngineSettings` by name, for example `tensor_parallel_size`, `dtype`, `max_model_len`.

    Raises:
        ConfigError, CheckpointError: the directory is not a supported model, or a setting is invalid.
        LayoutError: the model cannot be cut over so many devices.
        ResourceError: not enough memory.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._model_dir = _validate.path("llm", "model", model)
        self._template: ChatTemplate | None = None
        self._engine: Engine | None = None
        self._encoder: Encoder | None = None
        ignore = settings.get("ignore_config_fields", ())
        if settings.get("runner") == "pooling" and models.is_encoder(
            models.open(self._model_dir, ignore=ignore)
        ):
            encoding = {"dtype": "auto", **encoder_settings("llm", settings)}
            self._encoder = Encoder(self._model_dir, **encoding)
        else:
            self._engine = Engine(self._model_dir, **{"enable_prompt_pacing": False, **settings})

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ConfigError: the model is an encoder, which has no engine.
        """
        if self._engine is None:
            rule, advice = "this call needs a model that generates text", "use encode"
            _validate.invalid("llm", rule, "an encoder", advice)
        return self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests with an error, stop the devices and free their memory."""
        if self._engine is not None:
            self._engine.close()
        if self._encoder is not None:
            self._encoder.close()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.model.tokenizer if self._encoder is None else self._encoder.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Settings of sampling from generation_config.json; defaults without the file."""
        return SamplingParams(**served_settings(self.engine.model.generation_config))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one or several: texts, token ids, or dictionaries with `prompt` or `prompt_token_ids`.
            sampling_params: settings for all prompts, or one for each; None: those of generation_config.json.
            use_tqdm: show progress on standard error if it is a terminal and the call takes a while.
            priority: lower runs first; for all prompts, or one for each.

        Returns:
            An output per prompt, in their order.

        Raises:
            ConfigError: a prompt or setting is invalid, or a prompt is too long; before any work.
            TaskFailed, NotFinite: the step of a request failed; the other requests of this call end, too.
        """
        prompt_list: Sequence[Prompt] = [prompts] if _is_one(prompts) else prompts  # type: ignore[assignment, list-item]
        prompt_list = _validate.sequence("llm", "prompts", prompt_list, "prompts")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        requests = self.engine.requests(prompt_list, params, priority)
        processors = [
            OutputProcessor(request, prompt, RequestOutputKind.FINAL_ONLY)
            for request, prompt in zip(requests, prompt_list)
        ]
        outputs: dict[str, RequestOutput] = {}
        with _progress(use_tqdm).phase("prompts", len(requests)) as phase:
            done = phase.counter()
            for output in self.engine.outputs(requests, processors):
                outputs[output.request_id] = output
                done.count += 1
        return [outputs[request.request_id] for request in requests]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Compute vectors of prompts, with a model made with `runner="pooling"`.

        A decoder returns the final hidden state of the last token, an encoder pools all tokens.

        Args:
            prompts: one or several: texts, token ids, or dictionaries with `prompt` or `prompt_token_ids`.
            use_tqdm: show progress on standard error if it is a terminal and the call takes a while.

        Returns:
            An output per prompt, in their order.

        Raises:
            ConfigError: a prompt is invalid or too long, or the model was made with another `runner`; before any work.
            TaskFailed, NotFinite: the step of a request failed; the other requests of this call end, too.
        """
        prompt_list: Sequence[Prompt] = [prompts] if _is_one(prompts) else prompts  # type: ignore[assignment, list-item]
        if self._encoder is not None:
            return _encode(self._encoder, prompt_list)
        requests = self.engine.pooling_requests(prompt_list)
        outputs: dict[int, PoolingRequestOutput] = {}
        with _progress(use_tqdm).phase("prompts", len(requests)) as phase:
            done = phase.counter()
            for delta in self.engine.deltas(requests):
                request = requests[delta.sequence]
                assert delta.vector is not None  # the only delta of a pooling request has the vector
                outputs[delta.sequence] = PoolingRequestOutput(
                    request.request_id,
                    PoolingOutput(delta.vector),
                    list(request.ids),
                    num_cached_tokens=delta.num_cached_tokens,
                )
                done.count += 1
        return [outputs[index] for index in range(len(requests))]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, with the model's chat template.

        Args:
            messages: dictionaries with `role` and usually `content`, oldest first; or a list of such lists.
            sampling_params: settings for all conversations, or one for each; None: those of generation_config.json.
            use_tqdm: show progress on standard error if it is a terminal and the call takes a while.
            add_generation_prompt: end with the tokens that introduce the model's answer.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: further variables of the template.

        Raises:
            ConfigError: the model has no chat template, or the template rejects a conversation; and as `generate`.
        """
        message_list = _validate.sequence("llm", "messages", messages, "messages")
        conversations: Sequence[Any] = (
            [message_list] if message_list and isinstance(message_list[0], Mapping) else message_list
        )
        prompts = [
            self.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Render a conversation with the model's chat template, as a prompt.

        Args:
            messages: dictionaries with `role` and usually `content`, oldest first.
            add_generation_prompt: end with the tokens that introduce the model's answer.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: further variables of the template.

        Raises:
            ConfigError: the model has no chat template, or the template rejects the conversation.
        """
        if self._template is None:
            self._template = ChatTemplate(self._model_dir)
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=chat_template_kwargs,
        )
        # the template's text contains the tokens that begin a prompt
        return {"prompt_token_ids": encode_prompt(self.get_tokenizer(), text, add_special_tokens=False)}


def _progress(use_tqdm: bool) -> Progress:
    """The progress display of a call."""
    return ProgressTracker() if _validate.truth("llm", "use_tqdm", use_tqdm) else Progress()


def _encode(encoder: Encoder, prompts: Sequence[Prompt]) -> list[PoolingRequestOutput]:
    """Vectors of prompts, by an encoder."""
    ids = [
        encoder.ids(prompt_form(prompt)[0], index)
        for index, prompt in enumerate(_validate.sequence("llm", "prompts", prompts, "prompts"))
    ]
    vectors = encoder.encode(ids)
    return [
        PoolingRequestOutput(f"text-{index}", PoolingOutput(vector), tokens, num_cached_tokens=0)
        for index, (vector, tokens) in enumerate(zip(vectors, ids))
    ]


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return True
    items = _validate.sequence("llm", "prompts", prompts, "prompts")
    return len(items) > 0 and all(
        isinstance(id_, (int, np.integer)) and not isinstance(id_, bool) for id_ in items
    )
