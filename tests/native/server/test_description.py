"""The OpenAPI description is valid and describes the server's behaviour."""

import pytest

from native.server.served import usual_server


def test_the_description_names_every_path_and_its_body():
    """References are resolved; examples of bodies are valid under their schemas, and wrong ones are not."""
    import jsonschema

    reported = usual_server().get("/openapi.json")[1]
    schemas = reported["components"]["schemas"]
    pages = {"/version", "/health", "/metrics", "/openapi.json", "/status.json"}
    pages |= {"/v1/models/{model}", "/v1/models"}
    assert {path for path, methods in reported["paths"].items() if "get" in methods} == pages
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
        content = reported["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"]["$ref"].removeprefix("#/components/schemas/") in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    root = {"$ref": "#/components/schemas/CompletionBody", "components": reported["components"]}
    judge = jsonschema.Draft202012Validator(root)
    assert judge.is_valid({"prompt": ["a", "b"], "max_tokens": 1, "top_k": 3, "colour": "any"})
    assert not judge.is_valid({"prompt": "a", "n": 0}) and not judge.is_valid({})


@pytest.mark.slow
def test_schemathesis_finds_nothing():
    """Valid and invalid requests generated from the description: no server error, and no undescribed answer."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.checks import CHECKS, load_all_checks

    names = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
    load_all_checks()
    checks = CHECKS.get_by_names([*names, "response_schema_conformance"])
    schema = schemathesis.openapi.from_url(f"{usual_server().url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 11
    quiet = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    for operation in operations:
        for mode in schemathesis.GenerationMode:

            @quiet
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                case.call_and_validate(checks=checks)

            try:
                ask()
            except Unsatisfiable:  # a path without parameters has nothing that could be wrong
                assert mode is schemathesis.GenerationMode.NEGATIVE
    usual_server().wait_idle()
