"""The storm's site begins each case with nothing of the case before."""

from __future__ import annotations

from pathlib import Path

import pymysql
import pytest

from databus.common.errors import MissingDependency
from tests.storm.mysql_site import MySqlSite
from tests.support.fixtures import skip_if_unwanted
from tests.support.mysql_server import mysql_launcher

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("product", ["mariadb", "mysql"])
def test_a_schema_whose_folder_has_a_strange_file_is_there_again_and_empty(
    product: str, tmp_path: Path
) -> None:
    skip_if_unwanted()
    if product == "mysql":
        try:
            mysql_launcher()
        except MissingDependency as error:
            pytest.skip(error.message)
    site = MySqlSite(product, tmp_path)
    try:
        site.fresh()
        connection = site.connect()
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE storm.t (id INT PRIMARY KEY)")
            cursor.execute("SELECT @@datadir")
            (Path(cursor.fetchone()[0]) / "storm" / "strange.file").touch()
            with pytest.raises(pymysql.err.Error):
                cursor.execute("DROP DATABASE storm")
        connection.close()
        site.fresh()
        assert site.tables() == []
    finally:
        site.close()
