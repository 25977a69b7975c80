"""The command line with signed requests and encrypted connections."""

import ssl
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import pytest

from neve.cli import main
from neve.cli.cluster import security
from neve.client.security import credentials_in_file

Up = Callable[..., AbstractContextManager[Any]]
ROOT = '{"username":"root","password":"root-secret"}'
DONE, USAGE, AUTH, UNREACHABLE = 0, 2, 4, 6


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=neve", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)],
        check=True, capture_output=True,
    )  # fmt: skip
    return pem, key


def test_every_verb_signs_and_encrypts(
    neve_up: Up,
    tmp_path: Path,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    keys: tuple[str, ...] = (
        "authenticationEnabled=true",
        "authorizationEnabled=true",
        f"initAuthenticationUser={ROOT}",
    )
    keys += ("tlsServerMode=enforcing", f"tlsCertPath={certificate[0]}", f"tlsKeyPath={certificate[1]}")
    secrets = tmp_path / "tools.yml"
    secrets.write_text("# of mqadmin\naccessKey: root\nsecretKey: root-secret\n")
    with neve_up(tmp_path / "neve", "--store", "", *(part for key in keys for part in ("--set", key))) as neve:
        monkeypatch.setenv("NAMESRV_ADDR", neve.namesrv)
        monkeypatch.setenv("NEVE_TLS_CA", str(certificate[0]))
        assert main.run(["topic", "list"]) == AUTH  # Encrypted, but unsigned.
        assert main.run(["topic", "create", "Orders", "--credentials", str(secrets), "--no-tls"]) == UNREACHABLE
        assert main.run(["topic", "create", "Orders", "--credentials", str(secrets)]) == DONE
        monkeypatch.setenv("NEVE_ACCESS_KEY", "root")
        monkeypatch.setenv("NEVE_SECRET_KEY", "root-secret")
        capfd.readouterr()
        assert main.run(["produce", "Orders", "secret body"]) == DONE
        assert main.run(["consume", "Orders", "--count", "1"]) == DONE
        assert "secret body" in capfd.readouterr().out
        assert main.run(["consume", "Orders", "--group", "g", "--count", "1"]) == DONE
        assert main.run(["topic", "show", "Orders"]) == DONE
        assert main.run(["topic", "ttl", "set", "Orders", "36h", "--yes"]) == DONE
        assert main.run(["topic", "ttl", "list"]) == DONE
        assert "Orders" in capfd.readouterr().out
        assert main.run(["topic", "delete", "Orders", "--yes"]) == DONE
        monkeypatch.setenv("NEVE_SECRET_KEY", "guess")
        assert main.run(["topic", "list"]) == AUTH
        assert "guess" not in "".join(capfd.readouterr())


def test_incomplete_credentials_or_tls_options_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half.yml"
    half.write_text("accessKey: root\nsecret: s3cr3t\n")
    assert main.run(["topic", "list", "--credentials", str(half)]) == USAGE
    assert main.run(["topic", "list", "--credentials", str(tmp_path / "none")]) == USAGE
    assert main.run(["topic", "list", "--tls-cert", str(half)]) == USAGE
    assert main.run(["topic", "list", "--tls-ca", str(half)]) == USAGE  # The file is not PEM.
    monkeypatch.setenv("NEVE_ACCESS_KEY", "root")
    assert main.run(["topic", "list"]) == USAGE
    said = "".join(capfd.readouterr())
    assert "secretKey" in said
    assert "NEVE_SECRET_KEY" in said
    assert "s3cr3t" not in said


def test_security_options_take_precedence_over_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: tuple[Path, Path]
) -> None:
    file = tmp_path / "tools.yml"
    file.write_text("accessKey: 'a:b'\nsecretKey: \"s\"\nother: x\n")
    assert credentials_in_file(file) == ("a:b", "s")
    assert security({}) == (None, False)
    monkeypatch.setenv("NEVE_ACCESS_KEY", "env")
    monkeypatch.setenv("NEVE_SECRET_KEY", "t")
    assert security({}).credentials == ("env", "t")
    assert security({"credentials": file}).credentials == ("a:b", "s")
    assert isinstance(security({"tls": True}).tls, ssl.SSLContext)
    shown = security({"tls_cert": certificate[0], "tls_key": certificate[1], "tls_ca": certificate[0]}).tls
    assert isinstance(shown, ssl.SSLContext)
    assert len(shown.get_ca_certs()) == 1
    assert security({"tls": False, "tls_ca": certificate[0]}).tls is False
    with pytest.raises(click.UsageError):
        security({"tls_key": certificate[1]})
