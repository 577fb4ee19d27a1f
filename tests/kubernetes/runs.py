"""Runs on the cluster under test, and what is done to them while they train.

The supervisor is the test's own process, as in the drills; agents and ranks are in pods. Times are
seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from perdure.storage.address import Credentials
from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import differences
from perdure.training.drill.job import PACE_ENV, drill_job, write_corpus
from perdure.training.engines.kubernetes import objects
from perdure.training.journal.history import RunHistory
from perdure.training.journal.steps import read_kept_steps
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import Decision
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.kubectl import Cluster
from tests.kubernetes.store import Store
from tests.s3.servers import ACCESS_KEY, SECRET_KEY
from tests.waiting import wait_for

PACE_S = 0.1
LIMIT_S = 840.0
RESTS_S = 2.0  # of training between two faults
STEPS = 150
START_S = 240.0
CLI_S = 240.0
WAITS_S = 10.0  # for several tries
SLOW_S = 0.5  # a step, where one thing after the other is done to a run


def engine_section(cluster: Cluster, namespace: str, **changes: Any) -> dict[str, Any]:
    """The engine section of a job of four ranks on two nodes."""
    mounts = {str(one["name"]): one for one in cluster.mounts()}
    volumes = [
        {
            "name": volume["name"],
            "mount_path": mounts[str(volume["name"])]["mountPath"],
            "read_only": True,
            "source": {kind: source for kind, source in volume.items() if kind != "name"},
        }
        for volume in cluster.volumes()
    ]
    variables = [{"name": name, "value": value} for name, value in cluster.environment().items()]
    container = {"name": objects.AGENT, "env": variables}
    return {
        "kind": "kubernetes",
        "namespace": namespace,
        "nodes": 2,
        "slots_per_node": 2,
        "spares": 1,
        "grace_s": 10,
        "image": cluster.image,
        "python": sys.executable if volumes else "python3",
        "reach": "direct",
        "place_timeout_s": 600,
        "volumes": volumes,
        "pod": {"spec": {"containers": [container]}} if variables else {},
        **changes,
    }


@dataclass
class ClusterRuns:
    """Jobs below one folder whose pods are in one namespace."""

    home: Path
    cluster: Cluster
    namespace: str
    store: Store
    references: dict[tuple[int, ...], RunOutcome] = field(default_factory=dict)

    def job(
        self, run_id: str, *, steps: int, pace_s: float = PACE_S, **changes: Mapping[str, Any]
    ) -> Job:
        """A small job; `changes` are fields of sections, by section."""
        write_corpus(self.home)
        engine = engine_section(self.cluster, self.namespace) | dict(changes.pop("engine", {}))
        storage = {
            "address": self.store.below(run_id),
            "endpoint": self.store.environment["AWS_ENDPOINT_URL"],
            "region": "us-east-1",
        }
        return drill_job(
            self.home,
            run_id,
            kind=ParallelKind.DDP,
            steps=steps,
            pace_s=pace_s,
            changes=changes,
            target={"engine": engine, "storage": storage},
        )

    def run(
        self, job: Job, *deeds: Deed, limit_s: float = LIMIT_S, rests_s: float = RESTS_S
    ) -> Played:
        """Run a job to its end, and do these things to it in turn, with training in between."""
        doing = Doing(deeds, rests_s)
        driver = RunDriver(self.home, limit_s=limit_s, credentials=KEYS)
        outcome = driver.run(job, hook=doing.look)
        doing.finish()
        self._print_times(job, outcome.history, doing.done_s)
        return Played(outcome, self.leftovers(job))

    def _print_times(self, job: Job, history: RunHistory, done_s: Sequence[float]) -> None:
        """For docs/kubernetes.md: to the first step, and from each deed to a step after it."""
        run = RunHandle(job, home=self.home, credentials=KEYS)
        at_s = sorted(one.at_s for one in read_kept_steps(run.store, job.run_id).values())
        if not at_s:
            return
        print(f"\n{job.run_id}: first step {at_s[0] - history.created_s:.1f} s after the start")
        known_s = [view.ended.at_s for view in history.attempts if view.ended is not None]
        for deed_s in done_s:
            next_s = next((one for one in at_s if one > deed_s + 1.0), deed_s)
            gap_s = max(
                (b - a for a, b in itertools.pairwise(at_s) if deed_s - 1.0 < b < deed_s + 240),
                default=0.0,
            )
            told_s = next((one for one in known_s if one > deed_s), deed_s)
            over_s, again_s = told_s - deed_s, next_s - deed_s
            print(f"  attempt over after {over_s:.1f} s, a step after {again_s:.1f} s")
            print(f"  longest pause between two steps {gap_s:.1f} s")

    def supervise(self, job: Job, home: Path) -> subprocess.Popen[bytes]:
        """A supervisor of the job in a process of its own."""
        home.mkdir()
        file = home / "job.json"
        file.write_text(job.model_dump_json())
        with (home / "supervisor.out").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.kubernetes.supervise", str(home), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kept(self, job: Job) -> int:
        """The newest step whose record is in the store."""
        run = RunHandle(job, home=self.home, credentials=KEYS)
        return max(read_kept_steps(run.store, job.run_id), default=0)

    def history(self, job: Job) -> RunHistory:
        """What is on record of a run."""
        return RunHandle(job, home=self.home, credentials=KEYS).refresh()

    def played(self, job: Job) -> Played:
        """What is left of a run that others have supervised."""
        return Played(
            RunDriver(self.home, credentials=KEYS).outcome(job, "completed"), self.leftovers(job)
        )

    def undisturbed(self, job: Job) -> RunOutcome:
        """The same job on this machine's own processes, where nothing happens to it.

        Jobs of as many steps and ranks are all the same program.
        """
        key = (job.steps, job.engine.nodes, job.engine.slots_per_node)
        if key not in self.references:
            self.references[key] = self._undisturbed(job)
        return self.references[key]

    def _undisturbed(self, job: Job) -> RunOutcome:
        home = self.home / "undisturbed"
        write_corpus(home)
        document = job.model_dump(mode="json")
        engine = {name: document["engine"][name] for name in ("nodes", "slots_per_node")}
        plain = {
            "storage": {"address": f"file://{home / 'store'}"},
            "engine": engine,
            "env": {**document["env"], PACE_ENV: "0"},
        }
        driver = RunDriver(home, limit_s=max(LIMIT_S, job.steps))
        return driver.run(parse_job(document | plain))

    def pod(self, job: Job, member: int) -> str:
        """Name of the pod that a member has now."""
        selector = f"{objects.selector(job)},{objects.MEMBER}={member}"
        found = self.cluster.get("pods", "--namespace", self.namespace, "--selector", selector)[
            "items"
        ]
        newest = max(found, key=lambda pod: int(pod["metadata"]["labels"][objects.SCHEDULE_CNT]))
        return str(newest["metadata"]["name"])

    def leftovers(self, job: Job) -> list[str]:
        """Names of what the run still has in the cluster."""
        kinds = "pods,secrets,configmaps,podgroups"
        found = self.cluster.get(
            kinds, "--namespace", self.namespace, "--selector", objects.selector(job)
        )
        return [f"{one['kind']} {one['metadata']['name']}" for one in found["items"]]


KEYS = Credentials.model_validate({"access_key": ACCESS_KEY, "secret_key": SECRET_KEY})


@dataclass(frozen=True)
class Played:
    """A run that is over, and what is left of it in the cluster."""

    outcome: RunOutcome
    leftovers: list[str]

    @property
    def history(self) -> RunHistory:
        return self.outcome.history

    @property
    def answers(self) -> list[tuple[str, str]]:
        """Fault class and rung of every recovery, in order."""
        return [(fault.fault_class, decision.rung) for fault, decision in self._faults()]

    @property
    def evidence(self) -> list[str]:
        """What showed the fault, of every recovery."""
        return [fault.evidence for fault, _ in self._faults()]

    def _faults(self) -> Iterator[tuple[Fault, Decision]]:
        for view in self.history.attempts:
            for one in view.recoveries:
                yield one.began.fault, one.began.decision
            if view.fault is not None and view.decision is not None:
                yield view.fault, view.decision

    @property
    def counts(self) -> list[list[tuple[int, int]]]:
        """MA_SCHEDULE_CNT and MA_PROC_START_CNT of each member, attempt after attempt."""
        found: list[list[tuple[int, int]]] = []
        for view in self.history.attempts:
            assert view.ended is not None
            started = view.ended.proc_start_cnt
            found.append([(m.schedule_cnt, started.get(m.node, 0)) for m in view.members])
        return found


@dataclass(frozen=True)
class Deed:
    """Something that is done to a run.

    Attributes:
        what: gets the run; raises if what it is to break is not there.
        ends_attempt: whether an attempt ends with it; nothing more is done before the next trains.
    """

    what: Callable[[RunSupervisor], None]
    ends_attempt: bool = True


@dataclass
class Doing:
    """Does one thing after the other, each while the run trains."""

    deeds: Sequence[Deed]
    rests_s: float
    errors: list[BaseException] = field(default_factory=list)
    done: int = 0
    thread: threading.Thread | None = None
    calm_since_s: float = 0.0
    calm_step: int = -1
    done_s: list[float] = field(default_factory=list)

    def look(self, run: RunSupervisor, progress: Progress) -> None:
        """Called after each look of the supervisor at its run."""
        if self.errors:
            raise self.errors[0]
        if self.done == len(self.deeds) or (self.thread is not None and self.thread.is_alive()):
            return
        ended = sum(one.ends_attempt for one in self.deeds[: self.done])
        if len(run.history.attempts) <= ended:
            return
        step = progress.last.step if progress.last is not None else 0
        if step <= self.calm_step or run.history.open_attempt is None or step == 0:
            return
        now_s = time.monotonic()
        if self.calm_since_s == 0.0:
            self.calm_since_s = now_s
        if now_s - self.calm_since_s > self.rests_s:
            deed, self.calm_since_s, self.calm_step = self.deeds[self.done], 0.0, step + 1
            self.done += 1
            self.done_s.append(time.time())
            self.thread = threading.Thread(target=self._do, args=(deed, run))
            self.thread.start()

    def _do(self, deed: Deed, run: RunSupervisor) -> None:
        try:
            deed.what(run)
        except BaseException as error:  # noqa: BLE001 the test's own thread raises it
            self.errors.append(error)

    def finish(self) -> None:
        """All was done, and none of it failed."""
        if self.thread is not None:
            self.thread.join()
        assert not self.errors, self.errors
        assert self.done == len(self.deeds), f"{self.done} of {len(self.deeds)} things were done"


def node_of(run: RunSupervisor, member: int) -> str:
    """The node that a member is on now."""
    placed = run.history.placement
    assert placed is not None
    return placed.members[member].node


def kills_rank(lab: Lab, rank: int) -> Deed:
    """SIGKILL to the worker of a rank, as the kernel would do it."""

    def kill(run: RunSupervisor) -> None:
        node = node_of(run, rank // run.job.engine.slots_per_node)
        lab.kill_process(node, lambda process: process.name() == f"rank-{rank}")

    return Deed(kill, ends_attempt=False)


def deletes_pod(runs: ClusterRuns, member: int, *options: str) -> Deed:
    """A person deletes the pod of a member."""

    def delete(run: RunSupervisor) -> None:
        pod = runs.pod(run.job, member)
        runs.cluster.kubectl(
            "delete", "pod", pod, "--namespace", runs.namespace, "--wait=false", *options
        )

    return Deed(delete)


def evicts_pod(runs: ClusterRuns, member: int) -> Deed:
    """The pod of a member is evicted, as `kubectl drain` does it."""

    def evict(run: RunSupervisor) -> None:
        pod = runs.pod(run.job, member)
        eviction = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": runs.namespace},
        }
        path = f"/api/v1/namespaces/{runs.namespace}/pods/{pod}/eviction"
        runs.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))

    return Deed(evict)


def powers_off(lab: Lab, member: int) -> Deed:
    """The node of a member loses its power."""
    return Deed(lambda run: lab.power_off(node_of(run, member)))


def removes(lab: Lab, member: int) -> Deed:
    """The node of a member loses its power, and is taken out of the cluster at once."""

    def remove(run: RunSupervisor) -> None:
        node = node_of(run, member)
        lab.power_off(node)
        lab.delete_node(node)

    return Deed(remove)


def deletes_node(lab: Lab, member: int) -> Deed:
    """The living node of a member is taken out of the cluster."""
    return Deed(lambda run: lab.delete_node(node_of(run, member)))


def cuts_off(lab: Lab, member: int) -> Deed:
    """The network of a member's node fails; all that runs there runs on."""
    return Deed(lambda run: lab.cut(node_of(run, member)))


def takes_api_away(lab: Lab, seconds: float) -> Deed:
    """The API server is down for a while, and the controller manager is started anew."""

    def take(run: RunSupervisor) -> None:
        lab.api_server_down()
        time.sleep(seconds)
        lab.api_server_up()
        lab.restart_controller_manager()

    return Deed(take, ends_attempt=False)


def assert_as_undisturbed(played: Played, undisturbed: RunOutcome) -> None:
    assert (played.outcome.ended, undisturbed.ended) == ("completed", "completed")
    assert differences(played.outcome.curve, undisturbed.curve) == []
    assert played.outcome.state == undisturbed.state
    assert played.leftovers == []


def play(runs: ClusterRuns, name: str, *deeds: Deed, steps: int = STEPS, **changes) -> Played:
    """Run a job that these things happen to, and compare it with one that nothing happens to."""
    job = runs.job(name, steps=steps, **changes)
    played = runs.run(job, *deeds)
    assert_as_undisturbed(played, runs.undisturbed(job))
    return played


def await_wait(run: RunSupervisor, *words: str) -> None:
    """Return when a run shows that it waits, in these words of the platform."""

    def is_shown() -> bool:
        wait = run.ledger.wait
        return wait is not None and all(word in wait.text for word in words)

    wait_for(is_shown, timeout_s=START_S, period_s=0.2, what=f"a wait: {words}")


def assert_shown(runs: ClusterRuns, run: RunSupervisor, *words: str) -> None:
    """On another machine `perdure status` has these words."""
    run.ledger.renew()  # as the thread does that no driver of a drill has
    status = " ".join(perdure(runs, file_of(runs, run.job), "status").split())
    assert all(word in status for word in words), status


def waits_out(
    runs: ClusterRuns,
    *words: str,
    begin: Callable[[RunSupervisor], object],
    end: Callable[[RunSupervisor], object],
    look: Callable[[RunSupervisor], None] = lambda _run: None,
) -> Deed:
    """A pod is lost while something keeps the platform from starting another.

    The healthy member keeps its pod, and `perdure status` has these words.
    """

    def lose(run: RunSupervisor) -> None:
        begin(run)
        try:
            stays = runs.pod(run.job, 0)
            deletes_pod(runs, 1, "--grace-period=1").what(run)
            await_wait(run, *words)
            time.sleep(WAITS_S)
            assert runs.pod(run.job, 0) == stays
            assert_shown(runs, run, *words)
            look(run)
        finally:
            end(run)

    return Deed(lose)


def file_of(runs: ClusterRuns, job: Job) -> Path:
    """Write the job as a user has it."""
    file = runs.home / f"{job.run_id}.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    return file


def perdure(runs: ClusterRuns, file: Path, command: str, *options: str) -> str:
    """What the command line printed, on a machine that has never heard of the run."""
    done = subprocess.run(
        [sys.executable, "-m", "perdure", command, str(file), *options],
        env={
            **{name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"},
            **runs.store.environment,
            "PERDURE_HOME": str(file.parent / "laptop"),
        },
        capture_output=True,
        text=True,
        timeout=CLI_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
