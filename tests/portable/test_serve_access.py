"""Keys, foreign pages, request ids, unknown routes and methods."""

from __future__ import annotations

import pytest

from tests.portable.serving import CHAT, asking, error_of, hello
from troth.config.options import ServeOptions

KEYS = ("first-key", "schlüssel")
ROUTES = ("/", "/v1/models", "/v1/models/fake", "/v1/status", "/metrics")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer  first-key "}, 200),
        ({"x-api-key": "first-key"}, 200),
        ({"authorization": "Bearer schlüssel".encode()}, 200),
        ({}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer first-ke"}, 401),
        ({"authorization": "Bearer first-key2"}, 401),
        ({"authorization": "first-key"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
def test_key_opens_every_route_and_nothing_else_does(headers: dict[str, str | bytes], status: int) -> None:
    with asking(api_keys=KEYS) as client:
        for route in ROUTES:
            assert client.get(route, headers=headers).status_code == status, route
        assert client.post(CHAT, json=hello(), headers=headers).status_code == status
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == status


@pytest.mark.parametrize("origin", ["http://[::1", "http://[]/", "http://[v1.x", "null", "", "http://"])
def test_origin_that_is_none_is_foreign(origin: str) -> None:
    """Some were a 500."""
    with asking() as client:
        refused = client.post(CHAT, content=b"{}", headers={"origin": origin, "content-type": "text/plain"})
        served = client.post(CHAT, json=hello(), headers={"origin": origin})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "foreign_origin")
    assert served.status_code == 200


def test_missing_key_is_told_how_to_send_one() -> None:
    with asking(api_keys=KEYS) as client:
        response = client.get("/v1/models")
    assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(response)["code"] == "invalid_api_key"
    assert "x-api-key" in error_of(response)["message"]
    assert "first-key" not in response.text


def test_missing_key_hides_which_routes_exist() -> None:
    with asking(api_keys=KEYS) as client:
        assert client.get("/nowhere").status_code == 401


def test_health_needs_no_key() -> None:
    with asking(api_keys=KEYS) as client:
        assert client.get("/health").status_code == 200


def test_any_key_is_accepted_when_there_are_none() -> None:
    with asking() as client:
        assert client.get("/v1/models", headers={"authorization": "Bearer sk-anything"}).status_code == 200


def test_options_bind_to_this_machine_alone_by_default() -> None:
    assert ServeOptions().host == "127.0.0.1"


def test_page_of_another_site_may_not_post_without_asking_first() -> None:
    """A text/plain post needs no preflight: any web page could make this machine work."""
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    foreign = {"origin": "https://evil.example"}
    with asking() as client:
        refused = client.post(CHAT, content=body, headers={**foreign, "content-type": "text/plain"})
        assert refused.status_code == 403
        assert error_of(refused)["code"] == "foreign_origin"
        # A JSON post is preflighted by the browser, which gets no permission; desktop apps send it like this.
        assert (
            client.post(CHAT, content=body, headers={**foreign, "content-type": "application/json"}).status_code == 200
        )
        own = {"origin": "http://troth.test", "content-type": "text/plain"}
        assert client.post(CHAT, content=body, headers=own).status_code == 200
        assert client.post(CHAT, content=body).status_code == 200


def test_cors_is_off_unless_set() -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    with asking() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=preflight).headers
        assert client.run(client.http.options(CHAT, headers=preflight)).status_code == 405
    with asking(cors_origins=("https://app.example",), api_keys=KEYS) as client:
        allowed = client.run(client.http.options(CHAT, headers=preflight))
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = client.run(client.http.options(CHAT, headers={**preflight, "origin": "https://evil.example"}))
        assert "access-control-allow-origin" not in other.headers
        # A refusal must be readable by the page that gets it.
        refused = client.post(CHAT, json=hello(), headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_unknown_route_is_a_json_404() -> None:
    with asking() as client:
        response = client.post("/v1/nowhere", json={})
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


@pytest.mark.parametrize(("path", "method"), [(CHAT, "GET"), ("/v1/models", "POST"), ("/health", "DELETE")])
def test_wrong_method_is_405_and_names_the_right_one(path: str, method: str) -> None:
    with asking() as client:
        response = client.run(client.http.request(method, path))
    assert response.status_code == 405
    assert response.headers["allow"]
    assert error_of(response)["code"] == "method_not_allowed"


def test_query_string_is_tolerated() -> None:
    with asking() as client:
        assert client.post(f"{CHAT}?beta=true", json=hello()).status_code == 200


def test_request_id_of_the_client_is_echoed_and_never_becomes_the_engines() -> None:
    with asking() as client:
        response = client.post(CHAT, json=hello(), headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        assert "mine-1" not in response.text
        refused = client.get("/nowhere", headers={"x-request-id": "mine-2"})
        assert refused.headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "ü"])
def test_request_id_that_is_none_is_replaced(bad: str) -> None:
    with asking() as client:
        first, second = (
            client.get("/health", headers={"x-request-id": bad.encode()}).headers["x-request-id"] for _ in range(2)
        )
    assert first.startswith("req-")
    assert first != second


def test_request_ids_of_streams_do_not_leak_into_each_other() -> None:
    """The headers of streams are a constant; writing an id into it would show it to the next client."""
    with asking() as client:
        ids = [client.post(CHAT, json=hello(stream=True)).headers.get_list("x-request-id") for _ in range(2)]
    assert [len(one) for one in ids] == [1, 1]
    assert ids[0] != ids[1]
