"""Who may ask `serve`: this machine, with the token, from its own pages."""

from __future__ import annotations

import re

import pytest

from served_folders import TOKEN, add_run

OWN = {"origin": "http://127.0.0.1:8763"}


@pytest.mark.parametrize("path", ["/", "/runs.json", "/page/serve.js", "/record", "/runs/x/report"])
def test_nothing_is_shown_without_the_token(serve, path):
    client = serve(token=False)
    assert client.get(path).status_code == 401
    assert client.get(path, params={"token": "wrong"}).status_code == 401
    assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get(path, headers={"cookie": "stepscope=wrong"}).status_code == 401


def test_the_token_comes_once_in_the_address_and_then_as_a_cookie(serve, root):
    add_run(root, "one")
    client = serve(token=False)
    welcome = client.get("/", params={"token": TOKEN, "q": 'a"><script>'})
    cookie = welcome.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "url=/?q=a%22%3E%3Cscript%3E" in welcome.text
    assert TOKEN not in welcome.text
    assert TOKEN.lower() not in cookie  # every port of this machine gets the cookie
    assert client.get("/", headers={"cookie": f"stepscope={TOKEN}"}).status_code == 401
    bearer = {"authorization": f"Bearer {client.cookies['stepscope']}", "cookie": ""}
    assert client.get("/", headers=bearer).status_code == 401
    assert "one" in client.get("/").text


def test_the_welcome_never_leads_to_another_host(serve):
    client = serve(token=False)
    for path in ("//evil.example/x", "/\\evil.example"):
        text = client.get(f"http://127.0.0.1:8763{path}", params={"token": TOKEN}).text
        target = re.search(r"url=([^\"]*)", text)
        assert target is not None
        assert not target[1].startswith(("//", "/\\", "/%5C/"))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_programs_use_a_bearer_token(serve, scheme):
    client = serve(token=False)
    headers = {"authorization": f"{scheme} {TOKEN}"}
    assert client.get("/runs.json", headers=headers).json() == {"schema": 1, "runs": []}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8763", "127.0.0.1.evil.example", ""]
)
def test_a_name_of_another_site_that_points_here_is_refused(serve, host):
    assert serve().get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1", "[::1]:8763"])
def test_names_of_this_machine_are_fine_on_any_port(serve, host):
    assert serve().get("/", headers={"host": host}).status_code == 200


def test_other_origins_are_refused_also_with_the_cookie(serve, root):
    add_run(root, "one")
    client = serve()
    run = client.get("/runs.json").json()["runs"][0]["id"]
    path = f"/runs/{run}/tags"
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {},
        OWN | {"sec-fetch-site": "cross-site"},
    ):
        assert client.post(path, data={"tags": "x"}, headers=headers).status_code == 403
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get("/runs.json", headers=embedded).status_code == 403
    assert client.get("/runs.json").json()["runs"][0]["tags"] == []
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=followed).status_code == 200


def test_every_answer_has_a_policy_and_is_not_kept(serve, root):
    add_run(root, "one", trace=True)
    client = serve()
    run = client.get("/runs.json").json()["runs"][0]["id"]
    for path in ("/", f"/runs/{run}", f"/runs/{run}/report", "/page/serve.js", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-eval" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    report = client.get(f"/runs/{run}/report").headers["content-security-policy"]
    assert "script-src 'sha256-" in report
    assert "frame-ancestors 'self'" in report


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2f..%2fapi.py",
        "/page/base.html.j2",
        "/page/%2e%2e/guard.py",
        "/runs/..%2f..%2fetc%2fpasswd",
        "/runs/%00",
        "/runs/../../etc/passwd/report",
        "/compare?a=../../etc&b=/etc/passwd",
    ],
)
def test_paths_in_addresses_lead_nowhere(serve, root, path):
    add_run(root, "one")
    answer = serve().get(f"http://127.0.0.1:8763{path}")
    assert answer.status_code == 404
    assert "root:" not in answer.text
    assert "import" not in answer.text


def test_methods_that_no_page_has_are_refused(serve):
    client = serve()
    assert client.put("/", headers=OWN).status_code == 405
    assert client.delete("/runs/x", headers=OWN).status_code == 405
