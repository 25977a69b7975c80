"""Tests that the served certificate is reported, independent of later changes of its files."""

from __future__ import annotations

import logging
import ssl
import subprocess
from pathlib import Path

import pytest

from infra.net.tls import Certificate

_DAY_S = 86_400


def write_pair(pem: Path, key: Path, days: int) -> None:
    """Write a new certificate and key, valid for this number of days."""
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-keyout", str(key), "-out", str(pem), "-days", str(days), "-subj", "/CN=neve"]
    subprocess.run(made, check=True, capture_output=True)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "server.pem", tmp_path / "server.key"
    write_pair(*files, 30)
    return files


def test_served_certificate_outlives_missing_or_torn_files(pair: tuple[Path, Path]) -> None:
    certificate = Certificate(*pair)
    served, ends = certificate.context, certificate.ends_s()
    pair[0].write_text("-----BEGIN CERTIFICATE-----\n")
    assert (certificate.context, certificate.ends_s()) == (served, ends)
    pair[0].unlink()
    assert (certificate.context, certificate.ends_s()) == (served, ends)
    write_pair(*pair, 60)
    assert certificate.context is not served
    assert certificate.ends_s() - ends == pytest.approx(30 * _DAY_S, abs=120)


def test_certificate_file_with_key_and_comments_is_read(pair: tuple[Path, Path]) -> None:
    ends = Certificate(*pair).ends_s()
    pair[0].write_text(f"Für den Broker\n{pair[1].read_text()}\n{pair[0].read_text()}", "utf-8")
    assert Certificate(*pair).ends_s() == ends


def test_rejected_certificate_files_are_logged_once(pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    certificate = Certificate(*pair)
    pair[0].write_text("torn")
    with caplog.at_level(logging.WARNING, "infra.net.tls"):
        contexts = {certificate.context for _ in range(5)}
    assert len(contexts) == 1
    assert isinstance(contexts.pop(), ssl.SSLContext)
    assert caplog.text.count("keeping the old certificate") == 1
