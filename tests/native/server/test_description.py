"""The OpenAPI description is one, and what it describes is what the server does."""

import pytest

from native.server.served import usual_server


def test_the_description_names_every_path_and_its_body():
    """References lead somewhere, examples of bodies are valid under their schemas and wrong ones are not."""
    import jsonschema

    told = usual_server().get("/openapi.json")[1]
    schemas = told["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"):
        content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rsplit("/", 1)[1]
        jsonschema.Draft202012Validator.check_schema({**schemas[name], "components": told["components"]})
    root = {"$ref": "#/components/schemas/CompletionBody", "components": told["components"]}
    judge = jsonschema.Draft202012Validator(root)
    assert judge.is_valid({"prompt": ["a", "b"], "max_tokens": 1, "top_k": 3, "colour": "any"})
    assert not judge.is_valid({"prompt": "a", "n": 0}) and not judge.is_valid({})


@pytest.mark.slow
def test_schemathesis_finds_nothing():
    """Requests made from the description: no error of the server, no answer that the description does not know."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, settings

    server = usual_server()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = [
        schemathesis.checks.not_a_server_error,
        *(
            schemathesis.checks.CHECKS.get_by_names(
                ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
            )
        ),
    ]
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @(
            schemathesis.hypothesis.given(case=operation.as_strategy())
            if hasattr(schemathesis, "hypothesis")
            else _given(operation)
        )
        def ask(case):
            case.call_and_validate(checks=checks)

        ask()
        count += 1
    assert count == 12
