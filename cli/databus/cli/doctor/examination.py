"""Asks the servers and the databases of a configuration, and prints what is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape

from databus.cli.console.http_client import call
from databus.cli.doctor import machine_symptoms
from databus.cli.doctor.server_symptoms import ServerStatus, symptoms_of
from databus.cli.doctor.symptoms import Symptom
from databus.common.config import Config
from databus.common.errors import DatabusError, PreflightFailed
from databus.common.extras import version


def examine(config: Config | None, urls: Iterable[str]) -> None:
    """Print each symptom with its cure.

    Raises:
        PreflightFailed: one of them is fatal; all have been printed.
    """
    urls = list(dict.fromkeys([*urls, *_urls(config)]))
    found = [] if config is None else list(_of_configuration(config))
    answers = []
    for url in urls:
        try:
            answers.append(_answer(url))
        except DatabusError as error:
            found.append(Symptom(url, error.message, error.hint, is_fatal=True))
    found += symptoms_of(answers, version())
    console = Console(soft_wrap=True)
    for symptom in sorted(found, key=lambda one: not one.is_fatal):
        colour = "red" if symptom.is_fatal else "yellow"
        console.print(
            f"[{colour}]{escape(symptom.where)}[/]: {escape(symptom.problem)}. "
            f"{escape(symptom.cure)}",
            highlight=False,
        )
    console.print(
        f"{len(urls)} servers, {len(found)} findings, {sum(one.is_fatal for one in found)} of them "
        "stop changes or lose them",
        highlight=False,
    )
    if any(one.is_fatal for one in found):
        raise PreflightFailed("the findings in red stop changes or lose them")


def _answer(url: str) -> ServerStatus:
    asked_us = time.time_ns() // 1000
    document = call(f"{url.rstrip('/')}/v1/status")
    return ServerStatus(url.rstrip("/"), document, asked_us, time.time_ns() // 1000)


def _urls(config: Config | None) -> Iterator[str]:
    """The servers of a configuration, by the addresses on which they listen."""
    if config is None:
        return
    for section in (config.relay, config.bootstrap):
        if section is not None:
            scheme = "https" if config.http.tls is not None else "http"
            yield f"{scheme}://{section.listen}"


def _of_configuration(config: Config) -> Iterator[Symptom]:
    yield from machine_symptoms.symptoms_of(config)
    if config.relay is not None:
        yield from asyncio.run(_of_databases(config))


async def _of_databases(config: Config) -> list[Symptom]:
    """What the databases' own preflight finds, as ``databus check`` does."""
    from databus.relay.capture.source_catalogue import create_source

    found = []
    for database in config.database:
        source = create_source(database)
        try:
            findings = await source.preflight()
        except DatabusError as error:
            found.append(Symptom(database.name, error.message, error.hint, is_fatal=True))
        else:
            found += [
                Symptom(database.name, f"{one.setting}: {one.problem}", one.remedy, one.fatal)
                for one in findings
            ]
        finally:
            await source.close()
    return found
