"""Case after case over one server: run, compare, shrink what failed, and count."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tests.storm import script
from tests.storm.case import (
    NAMED_WITHIN_S,
    Case,
    Difference,
    Ended,
    ServerLost,
    StormCounters,
    TooSlow,
)
from tests.storm.generator import Generator, Grammar
from tests.storm.grammar.mysql_tables import MySqlGrammar
from tests.storm.grammar.postgres_tables import PostgresGrammar
from tests.storm.grammar.sqlite import SqliteGrammar
from tests.storm.known import KnownFaults
from tests.storm.live import Loop, Stalled
from tests.storm.mysql_site import MySqlSite
from tests.storm.postgres_site import PostgresSite
from tests.storm.script import Step
from tests.storm.shrinking import shrunk
from tests.storm.site import Site
from tests.storm.sqlite_site import SqliteSite

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclasses.dataclass
class Failure:
    """A case that failed, and the smallest script that fails as it did."""

    seed: int
    number: int
    found: Difference
    steps: list[Step]
    path: Path | None = None

    @property
    def signature(self) -> str:
        names = list(dict.fromkeys(step.production for step in self.steps if not step.is_action))
        return f"{self.found.kind}: {' + '.join(names)}"


def make_site(product: str, folder: Path) -> Site:
    if product == "sqlite":
        return SqliteSite(folder)
    return PostgresSite(folder) if product == "postgres" else MySqlSite(product, folder)


def make_grammar(rng: random.Random, site: Site) -> Grammar:
    kinds: dict[str, type[Grammar]] = {"postgres": PostgresGrammar, "sqlite": SqliteGrammar}
    return kinds.get(site.product, MySqlGrammar)(rng, site)


PRODUCTS = ("mariadb", "mysql", "postgres", "sqlite")
AGAIN = "python -m tests.storm"


class Storm:
    """One server, and the cases that were run over it.

    Owner: the main thread.
    """

    def __init__(self, product: str, folder: Path, keep: Path) -> None:
        self.most_failures, self.shrink_s, self.restarts = 1000, 60.0, True
        self.without: set[str] = set()
        self.server = f"--db {product}"
        """The options with which the same server is chosen again."""
        self.failures: list[Failure] = []
        self.counters = StormCounters()
        self.seeds: list[int] = []
        self.seconds = 0.0
        self._folder, self._keep = folder, keep
        self._is_lost = False
        self._known = KnownFaults()
        self._spark: SparkSession | None = None
        self._loop = Loop()
        self.site = make_site(product, folder)
        self.grammar_rules = [
            rule.name for rule, _ in make_grammar(random.Random(0), self.site).productions
        ]

    def use_spark(self) -> None:
        """Have Spark merge what the bootstrap stores."""
        from databus.bootstrap.merging.spark_merges import start_spark

        self._spark = start_spark("local[1]", "512m", scratch=self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._spark is not None:
            self._spark.stop()
        self.site.close()
        self._loop.close()

    def run(self, seed: int, seconds: float, statements: int, cases: int = 0) -> None:
        """Cases with the seeds ``seed``, ``seed`` + 1 and so on, until the time is over.

        ``cases``: no more than these; 0: any number.
        """
        deadline_s = time.monotonic() + seconds
        for number in itertools.count(seed):
            is_enough = 0 < cases <= len(self.seeds)
            if is_enough or time.monotonic() > deadline_s:
                return
            if len(self.failures) >= self.most_failures:
                return
            self.seeds.append(number)
            began_s = time.monotonic()
            try:
                failure = self._one(number, statements, deadline_s)
            except BaseException as error:
                error.add_note(f"in the case of seed {number}")
                raise
            self.seconds += time.monotonic() - began_s
            if failure is not None:
                self._keep_failure(failure)

    def _one(self, seed: int, statements: int, deadline_s: float) -> Failure | None:
        case = self._case("case")
        rng = random.Random(seed)
        grammar = make_grammar(rng, self.site)
        grammar.leave_out(self.without)
        generator = Generator(rng, grammar, restarts=self.restarts)
        try:
            for _ in range(statements):
                if time.monotonic() > deadline_s:
                    break
                case.run(generator.next())
            case.finish()
        except Difference as error:
            return Failure(seed, len(case.steps), error, case.steps)
        except Stalled as error:
            stalled = Difference("stalled", "", [str(error)])
            return Failure(seed, len(case.steps), stalled, case.steps)
        except Ended:
            pass
        except TooSlow as error:
            case.counters.slow.append(f"seed {seed}, step {len(case.steps)}: {error}")
            waits = [f"    {line}" for line in self._loop.waits()]
            print(f"TOO SLOW {case.counters.slow[-1]}", *waits, sep="\n", flush=True)
        except ServerLost as error:
            case.counters.slow.append(f"seed {seed}, step {len(case.steps)}: {error}"[:400])
            self._is_lost = True
        except Exception as error:
            if self.site.is_running:
                raise
            # An old server that ended by a fault of its own.
            case.counters.slow.append(
                f"seed {seed}, step {len(case.steps)}: it ended: {error}"[:400]
            )
            self._is_lost = True
        finally:
            with contextlib.suppress(Exception) if self._is_lost else contextlib.nullcontext():
                case.close()
            self.counters.add(case.counters)
        return None

    def _case(self, name: str, named_within_s: float = NAMED_WITHIN_S) -> Case:
        """A fresh world; with another server where the last one did not come up again."""
        if self._is_lost:
            with contextlib.suppress(Exception):
                self.site.close()
            folder = Path(tempfile.mkdtemp(prefix="site-", dir=self._folder))
            folder.chmod(0o755)
            self.site, self._is_lost = make_site(self.site.product, folder), False
        return Case(
            self.site, self._loop, self._folder / name, self._known,
            named_within_s=named_within_s, spark=self._spark,
        )  # fmt: skip

    def _keep_failure(self, failure: Failure) -> None:
        kind = failure.found.kind
        last: list[Difference] = []

        deadline_s = time.monotonic() + self.shrink_s

        def fails(steps: list[Step]) -> bool:
            if time.monotonic() > deadline_s:
                return False  # One that stalls takes a minute each time.
            found = self.replay(steps, is_finished=kind in ("unhealed", "unseeded"))
            if found is not None and found.kind == kind:
                last.append(found)
                return True
            return False

        steps = [step for step in failure.steps if step.sql != script.CHECK]
        name = failure.found.table.split(" ")[0].rpartition(".")[2].lower()
        if len(steps) > 20 and name:
            naming = [step for step in steps if step.is_action or name in step.sql.lower()]
            if fails([*naming, script.check()]):
                steps = naming
        if fails([*steps, script.check()]):
            failure.steps = shrunk(steps, lambda s: fails([*s, script.check()]), self.shrink_s)
            failure.found = last[-1]
        elif fails(failure.steps):
            failure.steps = shrunk(failure.steps, fails, self.shrink_s)
            failure.found = last[-1]
        failure.path = self._keep / f"{self.site.product}-{failure.seed}.jsonl"
        script.written([*failure.steps, script.check()], failure.path)
        text = "; ".join(step.sql for step in failure.steps)
        if why := self._known.why(self.site.product, failure.found, text):
            self.counters.known[why] += 1
            return
        self.failures.append(failure)
        print(report_of(failure, self.server), flush=True)

    def replay(self, steps: list[Step], *, is_finished: bool = False) -> Difference | None:
        """What a script gives; ``is_finished``: suspended tables come back at its end."""
        case = self._case("replay", named_within_s=3.0)
        try:
            for step in steps:
                case.run(step)
            if is_finished:
                case.finish()
        except Difference as error:
            return error
        except (TooSlow, Ended):
            return None
        except ServerLost:
            self._is_lost = True
            return None
        finally:
            case.close()
        return None

    @property
    def is_clean(self) -> bool:
        """Whether something was compared and nothing failed."""
        return not self.failures and self.counters.comparisons.total() > 0

    def report(self) -> str:
        """Numbers and coverage, for people."""
        counters = self.counters
        done = sum(n for name, n in counters.successes.items() if name not in script.ACTIONS)
        lines = [
            f"{self.site.product} {self.site.version}: {len(self.seeds)} cases, seeds "
            f"{self.seeds[0]} to {self.seeds[-1]}, {done} statements that succeeded, "
            f"{sum(counters.failures.values())} refused, "
            f"{done / max(self.seconds, 1):.0f} a second",
            f"{counters.events} row events, {counters.comparisons.total()} comparisons of tables "
            f"({formatted_counts(counters.comparisons)}), {counters.merges} merges by Spark, "
            f"{counters.unequal_but_named} unequal and named, {len(self.failures)} failures",
            "suspended: "
            + "; ".join(f"{n} x {why}" for why, n in counters.suspensions.most_common()),
            f"{counters.healed} tables were suspended at a case's end and came back, "
            f"{counters.undumped} cannot be read and are named so; known faults: "
            + ("; ".join(f"{n} x {why}" for why, n in counters.known.most_common()) or "none"),
            *(f"too slow: {what}" for what in counters.slow),
            "refused most: "
            + "; ".join(f"{n} x {why}" for why, n in counters.refusals.most_common(6)),
            f"{len(counters.kinds)} kinds of statements: {formatted_counts(counters.kinds)}",
            "coverage (statements that succeeded, refused, by production):",
        ]
        for name in sorted({*self.grammar_rules, *counters.successes, *counters.failures}):
            lines.append(f"  {counters.successes[name]:6} {counters.failures[name]:6}  {name}")
        never = [name for name in self.grammar_rules if not counters.successes[name]]
        lines.append(f"never: {', '.join(never) or 'none'}")
        signatures = Counter(failure.signature for failure in self.failures)
        lines += [f"{n} x {signature}" for signature, n in signatures.most_common()]
        return "\n".join(lines)


def formatted_counts(counts: Counter[str]) -> str:
    """Numbers by name, for people."""
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"


def report_of(failure: Failure, server: str) -> str:
    """A failure for people: one line that says all, and what belongs to it."""
    steps = "\n".join(f"    {step}" for step in failure.steps)
    found = failure.found
    details = "\n".join(f"    {line}" for line in [*found.details[:4], *found.history])
    return (
        f"FAILED {server} seed {failure.seed}, step {failure.number}: {found.kind}: {found.table}; "
        f"script {failure.path}; again: {AGAIN} {server} --seed {failure.seed} --cases 1 "
        f"--minutes 10, or --replay {failure.path}\n{details}\n  {failure.signature}\n{steps}"
    )


def replayed(product: str, folder: Path, steps: list[Step]) -> int:
    """Run a stored script; 1 if it still fails."""
    with Storm(product, folder, folder) as storm:
        found = storm.replay(steps, is_finished=True)
        print(found or "no difference")
        return 1 if found else 0
