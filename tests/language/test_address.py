"""Rules at pinned addresses, from a server on this machine.

rulec trusts the certificates that Python's `ssl` trusts. The tests make one for the name `localhost`, and name it in
SSL_CERT_FILE, by which every user of OpenSSL adds certificates: the code has no switch for tests.
"""

from __future__ import annotations

import hashlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import rulec
from rulec.errors import RuleError
from rulec.language.library import remote
from rulec.language.library import remote as download
from rulec.language.library.remote import MAX_BYTES
from tests.cli.running import error, run, run_json

TEXT = b"""\
name: Pinned
hyper: {beta: 0.9}
state: {m: 0}
step: |
  m = beta*m + g
  direction = m
"""


def pin(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Site:
    """A server: its address, its answers by path, and the paths that were asked for."""

    root: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def pinned(self, path: str, content: bytes | None = None) -> str:
        return f"{self.root}{path}@sha256:{pin(self.files[path] if content is None else content)}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the server's certificate, is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    signed, key = folder / "localhost.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", signed],
        check=True, capture_output=True,
    )  # fmt: skip
    return signed, key


@pytest.fixture
def site(certificate: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A server with https on this machine, that this process trusts, and an empty cache."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    served = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(served))
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.root = f"https://localhost:{server.server_port}"
    served.files["/rule.yaml"] = TEXT
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    monkeypatch.setenv("NO_PROXY", "localhost")
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    yield served
    served.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            if self.path in site.redirects:
                self.send_response(302)
                self.send_header("Location", site.redirects[self.path])
                self.end_headers()
            elif self.path == "/silent.yaml":
                site.closing.wait()
            elif self.path in site.files:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(site.files[self.path])
            else:
                self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def refused(name: str) -> str:
    """The message of the error for an address."""
    with pytest.raises(RuleError) as caught:
        rulec.load(name, allow_url=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_rule_is_fetched_once_and_kept_by_its_hash(site: Site, tmp_path: Path) -> None:
    name = site.pinned("/rule.yaml")
    loaded = rulec.load(name, allow_url=True)
    assert loaded == rulec.parse(TEXT.decode())
    kept = tmp_path / "cache" / "rules" / f"{pin(TEXT)}.yaml"
    assert kept.read_bytes() == TEXT
    assert kept.stat().st_mode & 0o777 == 0o600
    composed = f"clip_by_value >> lookahead({name}, k=3)"
    assert rulec.load(composed, allow_url=True) == rulec.load("clip_by_value") >> rulec.load("lookahead")(loaded, k=3)
    assert site.asked == ["/rule.yaml"]
    kept.write_bytes(TEXT.replace(b"0.9", b"0.8"))  # damaged: its hash is another
    assert rulec.load(name, allow_url=True) == loaded
    assert site.asked == ["/rule.yaml"] * 2


def test_commands_take_the_flag_and_clear_the_file(site: Site, tmp_path: Path) -> None:
    name = site.pinned("/rule.yaml")
    assert "--allow-url" in error("show", name, "--yaml")
    assert site.asked == []
    assert "m = beta*m + g" in run("show", name, "--yaml", "--allow-url")
    compared = run_json("diff", name, "--against", name, "--backend", "reference", "--steps", "2", "--allow-url")
    assert compared["equal"]
    assert site.asked == ["/rule.yaml"]
    assert run_json("cache", "clear")["left"] == []
    assert not (tmp_path / "cache" / "rules").exists()


def test_without_the_flag_nothing_is_fetched(site: Site) -> None:
    for name in (site.pinned("/rule.yaml"), f"clip_by_value >> {site.pinned('/rule.yaml')}"):
        with pytest.raises(RuleError, match=r"is on the web: rulec.load\(..., allow_url=True\) or --allow-url"):
            rulec.load(name)
    assert site.asked == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("https://localhost/rule.yaml", "is not pinned"),
        ("https://localhost/rule.yaml@sha256:12", "is not pinned"),
        (f"http://localhost/rule.yaml@sha256:{'0' * 64}", "by https only"),
        (f"file:///etc/rule.yaml@sha256:{'0' * 64}", "by https only"),
        (f"https:///rule.yaml@sha256:{'0' * 64}", "by https only"),
        (f"https://me:word@localhost/rule.yaml@sha256:{'0' * 64}", "no plain address"),
        (f"https://localhost:x/rule.yaml@sha256:{'0' * 64}", "is no address"),
    ],
)
def test_other_addresses_are_refused_before_anything_is_fetched(name: str, why: str) -> None:
    assert why in refused(name)


def test_a_file_with_another_hash_is_neither_parsed_nor_kept(site: Site, tmp_path: Path) -> None:
    site.files["/rule.yaml"] = b"]: no YAML"
    message = refused(site.pinned("/rule.yaml", TEXT))
    assert f"its SHA-256 is {pin(b']: no YAML')}, not {pin(TEXT)}" in message
    assert not (tmp_path / "cache" / "rules").exists()


def test_redirects_are_followed_by_https_only_and_so_far(site: Site) -> None:
    site.redirects = {"/moved.yaml": "/rule.yaml", "/round.yaml": "/round.yaml", "/plain.yaml": "http://localhost/x"}
    site.redirects["/file.yaml"] = "file:///etc/hostname"
    assert rulec.load(site.pinned("/moved.yaml", TEXT), allow_url=True).name == "Pinned"
    assert "redirects more than 5 times" in refused(site.pinned("/round.yaml", b""))
    assert site.asked.count("/round.yaml") == 6
    assert "by https only" in refused(site.pinned("/plain.yaml", b""))
    assert "by https only" in refused(site.pinned("/file.yaml", b""))


#: What a server may give as the place of a file.
NOWHERE = [
    "https://[::1", "https://[", "https://[::1]:x/rule.yaml", "https://localhost:99999/", "https://localhost:-1/",
    f"https://{'a' * 70}.example/", f"https://{'a.' * 200}example/", "https://./", "https://../rule.yaml",
    "https:///nowhere.yaml", "//", "//[", "http://localhost/", "ftp://localhost/", "file:///etc/passwd", "https://user@localhost/",
    "javascript:1",
    "https://[v1.x]/", "https://%zz/", "https://localhost:1/", "", "#", "?", "\t", "https://a b/", "\u00e9",
]  # fmt: skip


@pytest.mark.parametrize("to", NOWHERE)
def test_a_redirect_to_nowhere_is_said(to: str, site: Site) -> None:
    site.redirects["/moved.yaml"] = to
    with pytest.raises(RuleError, match=r"\w") as caught:
        rulec.load(site.pinned("/moved.yaml", TEXT), allow_url=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", [to for to in NOWHERE if to.startswith("https://") and "localhost:1/" not in to])
def test_an_address_of_nowhere_is_said(url: str) -> None:
    name = f"{url}@sha256:{pin(TEXT)}"
    with pytest.raises(RuleError, match=r"\w") as caught:
        rulec.load(name, allow_url=True)
    assert "\n" not in str(caught.value)
    remote.shown(name)


def test_size_and_time_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.files["/large.yaml"] = b"#" * (MAX_BYTES + 1)
    assert f"has more than {MAX_BYTES} bytes" in refused(site.pinned("/large.yaml"))
    monkeypatch.setattr(download, "SECONDS", 0.05)
    assert "was not fetched within 0.05 seconds" in refused(site.pinned("/silent.yaml", b""))
    # Whichever is first, the end of the wait for the server or that of the whole.
    monkeypatch.setattr(download, "_within", lambda seconds, url, work: work())
    assert "was not fetched within 0.05 seconds" in refused(site.pinned("/silent.yaml", b""))


def test_a_server_is_believed_by_its_certificate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the server answers 404" in refused(site.pinned("/other.yaml", b""))
    elsewhere = site.pinned("/rule.yaml").replace("localhost", "127.0.0.1")  # the certificate has another name
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    assert "certificate verify failed" in refused(elsewhere)
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "certificate verify failed" in refused(site.pinned("/rule.yaml"))
    assert "/rule.yaml" not in site.asked


def test_a_fetched_rule_is_of_the_library_and_mistakes_have_their_place(site: Site, tmp_path: Path) -> None:
    site.files |= {
        "/wrong.yaml": TEXT.replace(b"= m\n", b"= n\n"),
        "/files.yaml": b"name: Files\nplus: [other.yaml, adam]\n",
        "/python.yaml": b"name: Python\nplus: ['my.py:rule', adam]\n",
        "/web.yaml": f"name: Web\nplus: ['{site.pinned('/rule.yaml')}', adam]\n".encode(),
        "/made.yaml": b"name: Made\nplus: [adam, decay]\n",
    }
    with pytest.raises(RuleError) as caught:
        rulec.load(site.pinned("/wrong.yaml"), allow_url=True)
    assert str(caught.value).startswith(f"{site.root}/wrong.yaml:6:15: ")
    for path in ("/files.yaml", "/python.yaml", "/web.yaml"):
        with pytest.raises(RuleError, match=r"of rules of the library|there is no rule"):
            rulec.load(site.pinned(path), allow_url=True)
    assert "/rule.yaml" not in site.asked
    assert rulec.load(site.pinned("/made.yaml"), allow_url=True).state.keys() == {"m", "v"}


def test_tables_have_a_short_name() -> None:
    text = f"clip_by_value >> https://host/a/rule.yaml@sha256:{'12' * 32}"
    assert remote.shown(text) == "clip_by_value >> rule.yaml@12121212"
    assert remote.shown("adam + decay") == "adam + decay"
