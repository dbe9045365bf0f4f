"""JobSets, SLURM jobs and local processes against stand-ins: the calls, the manifest, signals, what users get wrong."""

import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.launch.stubs import ROOT, TRAIN, Stubs, assert_refused, wait_for


@pytest.fixture
def stubs(tmp_path):
    return Stubs(tmp_path, "kubectl", "sbatch", "scontrol", "scancel")


JOB = ("--name=run1", "--image=r/calyrex:1", "--topology=4x4")


def test_the_jobset_is_what_was_asked_for_and_apply_hands_it_over(stubs):
    odd = '--config.data.source=a "b" \\ $HOME: #x'
    options = ["--slices=2", "--bucket=gs://files", "--service-account=sa", "--secret=hf", "--spot", "--restarts=3"]
    arguments = [*JOB, *options, "--", "--config=configs/llama8b_late8th.py", odd]
    shown = stubs.run("launch/gke_jobset.sh", "manifest", *arguments)
    assert shown.returncode == 0, shown.stderr
    made = yaml.safe_load(shown.stdout)
    assert (made["kind"], made["metadata"]["name"], made["spec"]["failurePolicy"]["maxRestarts"]) == ("JobSet", "run1", 3)
    [slices] = made["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 4, 4, 0)
    of_pod = job["template"]["spec"]
    assert of_pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    [train] = of_pod["containers"]
    assert train["command"] == ["python", "-m", "calyrex_jax.main", "--config=configs/llama8b_late8th.py", odd]
    assert train["env"] == [{"name": "CALYREX_DISTRIBUTED", "value": "1"}]
    assert train["envFrom"] == [{"secretRef": {"name": "hf"}}] and train["resources"] == {"limits": {"google.com/tpu": 4}}
    assert train["volumeMounts"] == [{"name": "pod", "mountPath": "/pod"}]
    assert of_pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "files" and of_pod["serviceAccountName"] == "sa"

    assert stubs.calls() == []
    assert stubs.run("launch/gke_jobset.sh", "apply", *arguments).returncode == 0
    assert stubs.calls() == [["kubectl", "apply", "-f", "-"]]
    assert (stubs.directory / "applied").read_text() == shown.stdout


def test_the_jobset_of_one_host_has_nothing_more_than_it_needs(stubs):
    shown = stubs.run("launch/gke_jobset.sh", "manifest", "--name=a", "--image=i", "--topology=2x2", *TRAIN)
    job = yaml.safe_load(shown.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == 1
    assert not {"volumes", "serviceAccountName"} & set(job["template"]["spec"])
    assert not {"volumeMounts", "envFrom"} & set(job["template"]["spec"]["containers"][0])


def test_the_other_calls_of_the_jobset(stubs):
    for command in ("status", "logs", "delete"):
        assert stubs.run("launch/gke_jobset.sh", command, "--name=run1", "--namespace=ns").returncode == 0
    status, logs, delete = stubs.calls()
    assert status == [
        "kubectl",
        "get",
        "pods",
        "--namespace=ns",
        "--selector=jobset.sigs.k8s.io/jobset-name=run1",
        "--output=wide",
    ]
    assert logs[:3] == ["kubectl", "logs", "--namespace=ns"] and "--follow" in logs
    assert delete == ["kubectl", "delete", "jobset", "run1", "--namespace=ns", "--ignore-not-found"]


def test_a_rehearsal_of_the_jobset_calls_nothing(stubs):
    for command in ("manifest", "apply", "status", "logs", "delete"):
        done = stubs.run("launch/gke_jobset.sh", command, *JOB, "--dry-run", *TRAIN)
        assert done.returncode == 0 and done.stdout, done.stderr
        assert command == "manifest" or done.stdout.startswith("kubectl ")
    assert stubs.calls() == []


BAD_JOBSET = [
    (["create", *JOB], "'create' is no command"),
    (["apply", "--image=i", "--topology=4x4", *TRAIN], "--name is missing"),
    (["apply", "--name=a", "--topology=4x4", *TRAIN], "--image is missing"),
    (["apply", "--name=a", "--image=i", *TRAIN], "--topology is missing"),
    (["apply", "--name=a", "--image=i", "--topology=16", *TRAIN], "--topology is '16'; expected a shape such as 4x4"),
    (["apply", "--name=a", "--image=i", "--topology=3x3", *TRAIN], "has 9 chips, which --chips-per-host=4 does not divide"),
    (["apply", *JOB, "--slices=two", *TRAIN], "--slices is 'two'"),
    (["apply", *JOB], "no arguments for calyrex_jax.main"),
    (["apply", *JOB, "--", "a\nb"], "line break"),
]


@pytest.mark.parametrize("arguments, said", BAD_JOBSET, ids=[said[:30] for _, said in BAD_JOBSET])
def test_bad_input_of_the_jobset(stubs, arguments, said):
    assert_refused(stubs.run("launch/gke_jobset.sh", *arguments), said)
    assert stubs.calls() == []


GPUS = ("--nodes=2", "--gpus-per-node=8")


def test_sbatch_gets_one_process_a_gpu(stubs):
    done = stubs.run(
        "launch/slurm.sh", *GPUS, "--partition=a100", "--sbatch=--mem=0", "--", "--config=x y.py", TIME="1:00:00"
    )
    assert done.returncode == 0, done.stderr
    [call] = stubs.calls()
    assert call == [
        "sbatch",
        "--job-name=calyrex",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--partition=a100",
        "--time=1:00:00",
        f"--chdir={ROOT}",
        "--output=calyrex-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",
        "--export=ALL",
        "--mem=0",
        "launch/slurm_job.sh",
        "--config=x y.py",
    ]
    shown = stubs.run("launch/slurm.sh", *GPUS, "--per=node", "--dry-run", *TRAIN)
    assert "--ntasks-per-node=1 --gpus-per-node=8" in shown.stdout
    assert len(stubs.calls()) == 1


BAD_SLURM = [
    (["--gpus-per-node=8", *TRAIN], "--nodes is missing; say how many nodes"),
    (["--nodes=2", *TRAIN], "--gpus-per-node is missing"),
    (["--nodes=two", "--gpus-per-node=8", *TRAIN], "--nodes is 'two'"),
    ([*GPUS, "--per=host", *TRAIN], "--per is 'host'"),
    ([*GPUS], "no arguments for calyrex_jax.main"),
    ([*GPUS, "--config=x.py"], "'--config=x.py' is not understood"),
]


@pytest.mark.parametrize("arguments, said", BAD_SLURM, ids=[said[:30] for _, said in BAD_SLURM])
def test_bad_input_of_slurm(stubs, arguments, said):
    assert_refused(stubs.run("launch/slurm.sh", *arguments), said)
    assert stubs.calls() == []


# what srun stands for: the processes, which save at SIGTERM
SRUN = """#!/usr/bin/env bash
{ printf '%s\\037' srun "$JAX_COORDINATOR_ADDRESS" "${JAX_LOCAL_DEVICE_IDS:-}" "$@"; printf '\\036'; } >>"$STUBS/calls"
[ -n "${LONG:-}" ] || exit 0
trap 'exit 143' TERM
echo $$ >"$STUBS/srun.pid"
for ((i = 0; i < 300; i++)); do sleep 0.1; done
"""


def test_the_slurm_job_starts_its_processes(stubs):
    stubs.write("srun", SRUN)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41234", "PYTHON": "py"}
    done = stubs.run("launch/slurm_job.sh", "--config=x y.py", CALYREX_GPUS_A_TASK="4", **job)
    assert done.returncode == 0, done.stderr
    assert stubs.calls() == [
        ["scontrol", "show", "hostnames", "node[7-8]"],
        [
            "srun",
            "node7:21234",
            "0,1,2,3",
            "--kill-on-bad-exit=1",
            "--label",
            "py",
            "-m",
            "calyrex_jax.main",
            "--config=x y.py",
        ],
    ]


def test_the_slurm_job_saves_and_queues_itself_again_when_its_time_is_nearly_over(stubs):
    stubs.write("srun", SRUN)
    stubs.write("scancel", '#!/usr/bin/env bash\n[ "$*" = "--signal=TERM 5.0" ] && kill -TERM "$(cat "$STUBS/srun.pid")"\n')
    job = {"SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "5", "PYTHON": "py", "LONG": "1"}
    running = subprocess.Popen(["bash", ROOT / "launch/slurm_job.sh", "-x"], env=stubs.environment(**job))
    wait_for((stubs.directory / "srun.pid").exists)
    time.sleep(0.2)  # until it waits
    running.send_signal(signal.SIGUSR1)
    assert running.wait(timeout=30) == 143
    assert stubs.calls()[-1] == ["scontrol", "requeue", "5"]


# what stands for Python in local_processes.sh: says how it was called, then ends as the test asks
PROCESS = """#!/usr/bin/env bash
[ "$1" = -m ] || exec "$REAL" "$@"
place="$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS"
echo "$place, $JAX_PLATFORMS $JAX_NUM_CPU_DEVICES: $*" >"$STUBS/process.$JAX_PROCESS_ID"
echo "$JAX_PROCESS_ID speaks"
trap 'exit 143' TERM
[ "${FAILS:-}" != "$JAX_PROCESS_ID" ] || exit 7
[ -n "${LONG:-}" ] || exit 0
trap '[ -n "${DEAF:-}" ] || exit 143' TERM
for ((i = 0; i < 300; i++)); do sleep 0.1; done
"""


@pytest.fixture
def processes(stubs):
    stubs.write("py", PROCESS)
    return stubs, {"PYTHON": "py", "REAL": sys.executable, "TMPDIR": str(stubs.directory)}


def test_local_processes_tells_each_its_place(processes):
    stubs, environment = processes
    done = stubs.run("launch/local_processes.sh", "3", "--config=x y.py", DEVICES="4", PORT="1234", **environment)
    assert (done.returncode, done.stdout) == (0, "0 speaks\n"), done.stderr
    for index in range(3):
        said = (stubs.directory / f"process.{index}").read_text()
        assert said == f"{index} of 3 at 127.0.0.1:1234, cpu 4: -m calyrex_jax.main --config=x y.py\n"
    assert not list(stubs.directory.glob("calyrex_processes.*"))


def test_local_processes_ends_the_others_when_one_fails(processes):
    stubs, environment = processes
    done = stubs.run("launch/local_processes.sh", "2", "-x", FAILS="1", LONG="1", DEAF="1", GRACE="1", **environment)
    assert done.returncode == 7
    assert "process 1 ended with status 7" in done.stderr
    [logs] = stubs.directory.glob("calyrex_processes.*")
    assert (logs / "1.log").read_text() == "1 speaks\n"


def test_local_processes_passes_sigterm_on(processes):
    stubs, environment = processes
    command = ["bash", ROOT / "launch/local_processes.sh", "2", "-x"]
    running = subprocess.Popen(command, env=stubs.environment(LONG="1", **environment), stderr=subprocess.DEVNULL)
    wait_for(lambda: all((stubs.directory / f"process.{index}").exists() for index in range(2)))
    time.sleep(0.2)  # until they listen
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=30) == 143


@pytest.mark.parametrize(
    "arguments, environment, said",
    [
        ([], {}, "N is ''; expected a number of processes"),
        (["two", "--config=x"], {}, "N is 'two'"),
        (["2"], {}, "no arguments for calyrex_jax.main"),
        (["2", "--config=x"], {"DEVICES": "0"}, "DEVICES is '0'"),
    ],
)
def test_bad_input_of_local_processes(stubs, arguments, environment, said):
    assert_refused(stubs.run("launch/local_processes.sh", *arguments, **environment), said)
