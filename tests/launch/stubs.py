"""Stand-ins for gcloud, kubectl, sbatch and their like: a PATH on which the real ones do not exist, and what was called."""

import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "bash",
    "cat",
    "cp",
    "dirname",
    "gzip",
    "head",
    "mkdir",
    "mktemp",
    "nohup",
    "rm",
    "sed",
    "seq",
    "setsid",
    "sleep",
    "tail",
    "tar",
)

# Writes down its arguments, keeps what it copies or reads, and answers with the next line of a file.
STUB = r"""#!/usr/bin/env bash
{ printf '%s\037' "${0##*/}" "$@"; printf '\036'; } >>"$STUBS/calls"
next() { head -n 1 "$STUBS/$1" 2>/dev/null || true; sed -i 1d "$STUBS/$1" 2>/dev/null || true; }
case " $* " in
*" list "*) next states ;;
*"worker.sh status"*) next statuses ;;
*" scp "*) cp "$5" "$STUBS/copied.${5##*/}" ;;
*" apply "*) cat >"$STUBS/applied" ;;
*" hostnames "*) printf 'node7\nnode8\n' ;;
esac
while read -r words; do
  case " $* " in *" $words "*) exit 1 ;; esac
done < <(cat "$STUBS/failing" 2>/dev/null)
"""

TRAIN = ("--", "--config=configs/llama8b_late8th.py", "--workdir=pod/llama8b")


class Stubs:
    """`stubs.run("launch/tpu_pod.sh", …)` with the stand-ins on PATH; `stubs.calls()` is what they were called with."""

    def __init__(self, directory: Path, *names: str):
        self.directory, self.bin = directory, directory / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            self.real(tool)
        for name in names:
            self.write(name, STUB)

    def write(self, name: str, text: str) -> None:
        """One more program on PATH."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def real(self, tool: str) -> None:
        """The machine's own program on PATH."""
        (self.bin / tool).unlink(missing_ok=True)
        (self.bin / tool).symlink_to(shutil.which(tool))

    def answers(self, name: str, *lines: str) -> None:
        """What the next looks find: "states" of the VMs, "statuses" of the run; "failing": calls with these words fail."""
        (self.directory / name).write_text("".join(line + "\n" for line in lines))

    def environment(self, **more: str) -> dict[str, str]:
        """PATH, and nothing of ours that the scripts would read."""
        return {"PATH": str(self.bin), "HOME": str(self.directory), "STUBS": str(self.directory)} | more

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str):
        """The finished process."""
        return subprocess.run(
            ["bash", str(ROOT / script), *arguments],
            env=self.environment(**environment),
            cwd=cwd or self.directory,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[list[str]]:
        """[[program, argument, …], …] in order."""
        path = self.directory / "calls"
        text = path.read_text() if path.exists() else ""
        return [call.split("\x1f")[:-1] for call in text.split("\x1e")[:-1]]


def assert_refused(done, *parts: str) -> None:
    """Exit status 2 and one line "error: …" that holds `parts`."""
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line, line


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(what) -> None:
    """Until `what()` holds, ten seconds at most."""
    for _ in range(200):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError(what)
