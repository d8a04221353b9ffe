"""Certificates of an authority that a test makes: for servers on this machine, and for clients."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from databus.common.access.credentials import Credentials
from databus.common.access_config import TlsConfig

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class CertificateFiles:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """An authority; ``ca`` is its PEM file."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        signed = made.sign(self._key, hashes.SHA256())
        self.ca.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + 30 * _DAY)
        )

    def issue(self, name: str, *, unit: str = "", is_client: bool = False) -> CertificateFiles:
        """A certificate; a server's is for this machine.  One of the same name is replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if unit:
            parts.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if is_client else ExtendedKeyUsageOID.SERVER_AUTH
        made = self._builder(x509.Name(parts), key).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if not is_client:
            here = [
                x509.DNSName("localhost"),
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                x509.IPAddress(ipaddress.ip_address("::1")),
            ]
            made = made.add_extension(x509.SubjectAlternativeName(here), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        files = CertificateFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return files

    def server_tls(self, *, clients: str = "") -> TlsConfig:
        """A listener's settings; ``clients`` is required or optional."""
        files = self.issue("server")
        made: dict[str, object] = {"certificate": files.certificate, "key": files.key}
        if clients:
            made |= {"client_ca": self.ca, "client_certificates": clients}
        return TlsConfig.model_validate(made)

    def credentials(self, client: str = "", token: str = "") -> Credentials:
        """What a client of such a server has."""
        if not client:
            return Credentials(ca=str(self.ca), token=token)
        files = self.issue(client, is_client=True)
        return Credentials(
            ca=str(self.ca), token=token, certificate=str(files.certificate), key=str(files.key)
        )
