"""The stores that a configuration names: the databases, and the location of each one's runs.

Importable without Spark, and without boto3 if no store is on S3.
"""

from __future__ import annotations

import threading
from pathlib import Path

from databus.bootstrap.log.hot_log import FOLDER as LOG_FOLDER
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.run_storage import MANIFEST
from databus.common.config import BootstrapConfig
from databus.common.errors import ConfigError


def database_folders(data_dir: Path) -> dict[str, Path]:
    """The folders of the databases whose log exists here."""
    if not data_dir.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(data_dir.iterdir())
        if (path / LOG_FOLDER / "data.mdb").exists()
    }


class Stores:
    """All stores of one ``[bootstrap]`` section.

    Owner: the process; any thread.
    Raises: ConfigError, MissingDependency; StoreError if the bucket cannot be listed.
    """

    def __init__(self, config: BootstrapConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self._bucket = None
        if config.store:
            # Only here: boto3 takes a moment, and most stores are folders.
            from databus.common.storage.bucket import open_bucket

            self._bucket, self._prefix = open_bucket(config.store, config.s3)

    def store(self, database: str) -> Store:
        """The store of one database, whether its log exists or not; always the same object."""
        with self._lock:
            if database not in self._stores:
                self._stores[database] = self._made(database)
            return self._stores[database]

    def _made(self, database: str) -> Store:
        if not database or "/" in database or database.startswith("."):
            raise ConfigError(f"{database!r} cannot be the name of a database")
        if self._bucket is None:
            return Store(Path(self._config.data_dir) / database)
        from databus.bootstrap.runs.s3_storage import S3Storage

        return Store(S3Storage(self._bucket, f"{self._prefix}{database}/"))

    def stored(self) -> dict[str, Store]:
        """The databases that have a manifest, by name, whether their log is here or not."""
        if self._bucket is not None:
            names = self._bucket.keys(self._prefix, folders=True)
        else:
            data_dir = Path(self._config.data_dir)
            names = [path.parent.name for path in data_dir.glob(f"*/{MANIFEST}")]
        return {name: self.store(name) for name in sorted(names) if self.store(name).exists()}

    def begun(self) -> dict[str, Store]:
        """The databases of which anything is stored, by name."""
        names = set(database_folders(Path(self._config.data_dir)))
        if self._bucket is not None:
            names |= {
                name
                for name in self._bucket.keys(self._prefix, folders=True)
                if self.store(name).exists()
            }
        return {name: self.store(name) for name in sorted(names)}
