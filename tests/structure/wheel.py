"""Build the wheel, install it in a clean environment, and answer a question with it there.

Standard library only; `dev.py test` runs it with the Python of .venv. Exits non-zero with the
reason when the wheel lacks a file, holds a foreign one, or does not do the main job alone.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Rooms are folders of the checkout, linked into the package.
ROOMS = {
    "retrievers": "retrievers",
    "visual": "visual",
    "training": "training/heads",
    "pipelines": "pipelines",
}

WHERE = """
import pathlib, sys, ragspec, ragspec.retrievers, ragspec.visual, ragspec.pipelines
for module in (ragspec, ragspec.retrievers, ragspec.visual, ragspec.pipelines):
    file = pathlib.Path(module.__file__).resolve()
    if not file.is_relative_to(pathlib.Path(sys.prefix).resolve()):
        sys.exit(f"{module.__name__} came from {file}, not from the wheel in {sys.prefix}")
print("ragspec", ragspec.__version__, "from", pathlib.Path(ragspec.__file__).parent)
"""

NOTES = """# The lighthouse at Grey Point

The lighthouse at Grey Point was built in 1871 by the engineer Ada Thornton. Its lamp burned whale
oil until 1902, when the keepers changed to paraffin. The tower is 41 metres high.

The keepers grew potatoes behind the tower and sold them in the harbour on Fridays.
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Return what a command wrote to stdout; end the run with all it wrote when it fails."""
    display = [str(part) for part in command]
    done = subprocess.run(display, cwd=cwd, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode} from {display}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def packaged_files(root: Path = ROOT) -> set[str]:
    """Return the paths that a wheel of the checkout must hold: the core, starter and rooms."""
    homes = {root / place: Path("ragspec", room) for room, place in ROOMS.items()}
    homes |= {
        p: Path("ragspec", p.name) for p in (root / "ragspec").iterdir() if p.name not in ROOMS
    }
    files = (
        (path, home / path.relative_to(place))
        for place, home in homes.items()
        for path in (place.rglob("*") if place.is_dir() else [place])
    )
    names = {packed.as_posix() for path, packed in files if path.is_file()}
    return {name for name in names if "__pycache__" not in name}


def build(folder: Path) -> Path:
    """Build the sdist, and from it the wheel, without network; return the wheel, its list checked.

    Going through the sdist also proves that one, and leaves no `build` folder in the checkout.
    """
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.endswith("/")}
    missing = sorted(packaged_files() - held)
    foreign = sorted(n for n in held if not re.match(r"ragspec(/|-[^/]*\.dist-info/)", n))
    if missing or foreign:
        sys.exit(f"{wheel.name}: missing {missing}, foreign {foreign}")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Return the bin folder of a new environment with the wheel and no way to the checkout.

    Its dependencies are those of .venv, by a .pth line. Such a line adds a folder but does not
    read the .pth files in it, so the editable install of .venv stays out.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    bin_folder = folder / ("Scripts" if os.name == "nt" else "bin")
    python = bin_folder / Path(sys.executable).name
    options = ("install", "-q", "--no-deps", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, *options, wheel)
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    dependencies = run(sys.executable, "-c", ask)
    packages = Path(run(python, "-c", ask).strip())
    (packages / "dependencies.pth").write_text(dependencies, encoding="utf-8")
    return bin_folder


def lay_out(desk: Path) -> None:
    """Write the documents, and a package of the user that the wheel must not import."""
    (desk / "notes").mkdir(parents=True)
    (desk / "notes" / "lighthouse.md").write_text(NOTES, encoding="utf-8")
    (desk / "pipelines").mkdir()
    (desk / "pipelines" / "__init__.py").write_text("raise RuntimeError('not yours')\n")


def check_answer(answer: dict[str, Any]) -> None:
    """End the run where the answer is empty or a citation is not verbatim."""
    text = answer.get("answer")
    if not isinstance(text, str) or not text.strip():
        sys.exit(f"no answer in {answer}")
    for citation in answer["citations"]:
        quoted = text[citation["answer_start"] : citation["answer_end"]]
        if not quoted or quoted not in NOTES:
            sys.exit(f"the citation {citation} of {text!r} is not verbatim")


USES = {
    "": """
import ragspec
from ragspec.bridge import Speculation, speculative
engine = ragspec.Engine.from_pretrained("starter")
text = engine.generate("A draft tree is", max_new_tokens=8)
ids = engine.tokenizer("A draft tree is", return_tensors="pt")
out = engine.model.generate(
    **ids, custom_generate=speculative, speculation=Speculation(), max_new_tokens=8
)
assert out[0, ids["input_ids"].shape[1] :].tolist() == text.tokens
""",
    "rag": """
from ragspec.pipelines import DocQA
assert DocQA.from_documents("notes").ask("Who built the lighthouse at Grey Point?").text
""",
    "office": """
import docx
from ragspec.retrievers import load_document
file = docx.Document()
file.add_paragraph("A draft tree is checked.")
file.save("tree.docx")
assert load_document("tree.docx").text == "A draft tree is checked."
""",
    "serve": """
import threading, time, urllib.request, uvicorn
from ragspec import Engine
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
app = build_app(Serving(Engine.from_pretrained("starter"), "starter"), ServerSettings())
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    time.sleep(0.05)
port = server.servers[0].sockets[0].getsockname()[1]
assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
server.should_exit = True
thread.join()
""",
    "images": """
from ragspec.visual import ImagePipeline
out = ImagePipeline.from_pretrained("tiles")(class_labels=[24])
assert out.images and out.label == "exact"
""",
    "data": """
import datasets
datasets.Dataset.from_dict({"text": ["A draft tree is checked."]}).to_parquet("set/train.parquet")
from ragspec.pipelines.cli.app import main
assert main(["store", "build", "hf:set", "--model", "starter", "--out", "set.store"]) == 0
""",
    "gguf": "import gguf, ragspec.models.load",
    "adapters": "import peft, ragspec.models.load",
    "langchain": "import ragspec.adapters.langchain",
    "llamaindex": "import ragspec.adapters.llamaindex",
    "haystack": "import ragspec.adapters.haystack",
    "lm-eval": "import ragspec.adapters.lm_eval",
}
ALWAYS = ("", "rag", "serve", "images")  # the others take `--all`
HIDE = """
import os, sys
from importlib.machinery import PathFinder
HIDDEN = set(os.environ["HIDDEN"].split(","))
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in HIDDEN
        return None if hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, as its metadata states them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode("utf-8")
    return re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)


def needed(selection: Iterable[str], current: Sequence[str], extra: str) -> set[str]:
    """Return the distributions that ragspec with an extra brings, by canonical name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names: set[str] = set()
    queue = [(text, extra) for text in selection]
    while queue:
        text, of_extra = queue.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "ragspec":
            queue += [(each, inner) for inner in requirement.extras for each in current]
            continue
        if name in names and not requirement.extras:
            continue
        names.add(name)
        try:
            below = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        queue += [(each, inner) for inner in ("", *requirement.extras) for each in below]
    return names


def check_extra(python: Path, wheel: Path, desk: Path, extra: str) -> None:
    """Run the shortest use of an extra with every distribution hidden that it does not bring."""
    from packaging.utils import canonicalize_name

    current = requirements(wheel)
    supplied = needed(current, current, extra) | {"ragspec", "setuptools", "pip"}
    hidden = [
        top
        for top, names in importlib.metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & supplied
    ]
    environment = {**os.environ, "HIDDEN": ",".join(hidden), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-P", "-c", HIDE + USES[extra]]
    done = subprocess.run(
        command, cwd=desk, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        sys.exit(f"ragspec[{extra}] alone fails:\n{done.stdout}\n{done.stderr}")
    print(f"ragspec[{extra}] alone works", flush=True)


def check_size(wheel: Path) -> None:
    """End the run where the wheel without weights and documents of the starter is too large."""
    with zipfile.ZipFile(wheel) as archive:
        size = sum(i.compress_size for i in archive.infolist() if "/starter/" not in i.filename)
    print(f"{size / 1e6:.2f} MB without the starter models")
    if size > 3e6:
        sys.exit(f"{size} bytes without the starter models; expected at most 3 MB")


def main() -> None:
    """Build, install, ask, and use each extra alone; print one line for each."""
    with tempfile.TemporaryDirectory(prefix="ragspec-wheel-") as name:
        folder = Path(name).resolve()
        wheel = build(folder / "dist")
        print(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        check_size(wheel)
        bin_folder = install(wheel, folder / "env")
        desk = folder / "desk"
        lay_out(desk)
        python = bin_folder / Path(sys.executable).name
        print(run(python, "-P", "-c", WHERE, cwd=desk).strip(), flush=True)
        question = "Who built the lighthouse at Grey Point?"
        command = (bin_folder / "ragspec", "ask", question, "--docs", "notes", "--json")
        answer = json.loads(run(*command, cwd=desk))
        check_answer(answer)
        print(f"{question} {answer['answer'].strip()!r} ({answer['label']})")
        for extra in USES if "--all" in sys.argv else ALWAYS:
            check_extra(python, wheel, desk, extra)


if __name__ == "__main__":
    main()
