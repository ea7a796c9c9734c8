"""What the server refuses: names and pages of other sites, and questions that are none of the page's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rulec.tools.playground.server import KEY, LARGEST, Opening, make_app

HERE = "http://127.0.0.1:8710"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = make_app(Opening("name: A\n", "a.yaml", Path.cwd()), 8710, "key")
    with TestClient(app, base_url=HERE, headers={KEY: "key"}) as client:
        yield client


@pytest.mark.parametrize("host", ["127.0.0.1:8710", "localhost:8710"])
def test_the_page_is_served_to_this_machine(client: TestClient, host: str) -> None:
    page = client.get("/", headers={"host": host})
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    for file in ("page/play.js", "page/codemirror.js", "page/play.css", "katex/katex.min.js"):
        assert file in page.text or file.startswith("page/codemirror")
        assert client.get(file).status_code == 200
    assert client.get("page/play.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8710", "127.0.0.1", "127.0.0.1:80", "", "192.168.0.7:8710"]
)
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    """A name that leads to this address: DNS rebinding."""
    for path in ("/", "/start", "/page/play.js"):
        answer = client.get(path, headers={"host": host})
        assert (answer.status_code, answer.headers.get("content-type")) == (403, "text/plain; charset=utf-8")
        assert answer.text == "Refused: the Host header is not the address that rulec play printed.\n"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:8710", "http://127.0.0.1:9999", None]
)
def test_a_question_of_another_site_is_refused(client: TestClient, origin: str | None) -> None:
    headers = {} if origin is None else {"origin": origin}
    answer = client.post("/ask/mistakes", json={"text": ""}, headers=headers)
    assert (answer.status_code, answer.text) == (403, "Refused: the request comes from another site.\n")
    if origin is not None:
        assert client.get("/start", headers=headers).status_code == 403


def test_files_are_not_read_by_pages_of_other_sites(client: TestClient) -> None:
    for site in ("cross-site", "same-site"):
        assert (
            client.get("/page/play.js", headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}).status_code
            == 403
        )
        assert client.get("/", headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/start", headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}).status_code == 200


@pytest.mark.parametrize("key", ["", "ke", "keys", "é"])
def test_without_the_key_nothing_is_said(client: TestClient, key: str) -> None:
    """As other users of the machine ask."""
    headers = {KEY: key.encode(), "origin": HERE}
    for answer in (
        client.get("/start", headers=headers), client.get("/rule/adam", headers=headers),
        client.post("/ask/mistakes", json={"text": ""}, headers=headers),
    ):  # fmt: skip
        assert (answer.status_code, answer.text) == (403, "Refused: open the whole address that rulec play printed.\n")


@pytest.mark.parametrize(
    ("question", "body", "status", "sentence"),
    [
        ("shell", "{}", 404, "the page has no question 'shell'"),
        ("mistakes", "{", 400, "the body of a question is JSON"),
        ("mistakes", "[" * 100_000, 400, "the body of a question is JSON"),
        ("mistakes", '{"file": "x"}', 400, "the question mistakes has the arguments text"),
        ("mistakes", '{"text": 3}', 400, "the argument text of the question mistakes is of another type"),
        (
            "path",
            '{"text": "", "function": "valley", "hyper": {"lr": "a"}}',
            400,
            "the argument hyper of the question path is of another type",
        ),
        (
            "race",
            '{"text": "", "task": "valley", "rivals": [3]}',
            400,
            "the argument rivals of the question race is of another type",
        ),
        (
            "words",
            '{"text": "", "line": true, "column": 0}',
            400,
            "the argument line of the question words is of another type",
        ),
        ("mistakes", " " * (LARGEST + 1), 413, f"this is over {LARGEST} bytes: it is no rule file"),
    ],
)
def test_what_is_no_question_is_refused(
    client: TestClient, question: str, body: str, status: int, sentence: str
) -> None:
    answer = client.post(f"/ask/{question}", content=body, headers={"origin": HERE})
    assert (answer.status_code, answer.text) == (status, sentence)


@pytest.mark.parametrize("name", ["nothing", "../pyproject", "/etc/passwd", "transforms", "my.py:rule"])
def test_files_outside_the_library_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/rule/{name}").status_code == 404
    assert client.get("/page/%2e%2e/server.py").status_code == 404


def test_rules_of_the_library_are_served(client: TestClient) -> None:
    assert client.get("/rule/transforms/lookahead").text.startswith("name: Lookahead")
    start = client.get("/start").json()
    assert (start["text"], start["file"]) == ("name: A\n", "a.yaml")
    assert "muon" in start["rules"]
