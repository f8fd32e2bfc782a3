"""The projects whose kernels are run, each at a fixed commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

HUB = "https://github.com/{owner}/{name}"
# What is checked out of a repository.
SOURCES = ("*.py", "*.metal", "*.h", "*.json", "*.md")


@dataclass(frozen=True)
class Repository:
    """A public repository.

    Attributes:
        path: owner and name, as in its address.
        commit: the commit that is checked out, as 40 hexadecimal digits.
        root: the folder from which its Python packages are imported.
    """

    path: str
    commit: str
    root: str = "."

    @property
    def folder(self) -> str:
        """The name of its checkout."""
        return self.path.replace("/", "+")


REPOSITORIES = (
    Repository("Aedelon/mlx-mast3r", "7951811a9a43f63fe26e095726f063de7c23fe63", "src"),
    Repository("Blaizzy/mlx-audio", "ebf44dfcdcf28cac2993445e46e7c72a9eca7421"),
    Repository("Blaizzy/mlx-vlm", "9b13f522a7f1d214f426c67bb292c9e1065e9108"),
    Repository("DatasunriseOU/cppmega_mlx", "2e9ad3238c01e459b519a898b91f1c6d71f738f3"),
    Repository("appautomaton/mlx-atomistic", "95069a63ce20480b9bfe1c87e2d50fb1764d1477", "src"),
    Repository("appautomaton/mlx-spatial", "ad12a5191ff64d9c144024805f3776ac29eeb568", "src"),
    Repository("appautomaton/mlx-speech", "1974d4570b6522d8236128234d9ed20d6e62cf6e", "src"),
    Repository("cmoyates/corridorkey-mlx", "d2adddf2de3f25676746bc5ee882e299ae3deca3", "src"),
    Repository("dahai80/fusion-mlx", "e7b21b93d91a753c148c68c280b198c78b8b3b7a"),
    Repository("ggml-org/ggml", "d99724f2b141fed9e1a9f402213506c081433465", "src"),
    Repository("jjang-ai/vmlx", "3e256e3ffc1eef294aa2294cd2fb6861a587950d"),
    Repository("lisihao/FlashMLX", "9947edaeab29108dc3f07868da07abcb92072df7", "src"),
    Repository("ml-explore/mlx-examples", "7ddca42f4dc83ea70f4c53d1b6a917d335ab435d"),
    Repository("ml-explore/mlx-lm", "d78bf58e217c904ec282ed8da9b947491f78c022"),
    Repository("ml-explore/mlx", "846d176227a0ac13d2667e58d2bb68b322109ab0"),
    Repository("motsognirr/olmlx", "3eea12073b08183403e57da8a2f8f5561f1cde13"),
    Repository("raullenchai/Rapid-MLX", "7222ca776c029b045cba424e7b2e942c5073529f"),
    Repository("shaneholloman/dflash-mlx", "1ba671372b289c025b435c1a13aabb4bfb80b183"),
    Repository("ssmall256/demucs-mlx", "4b73cfe04258f97100ff6bae20a0a652e99c8845"),
    Repository("ssmall256/mlx-spectro", "c0c36054ce3d622d638a1931e7c28ee94d88ebcd", "src"),
    Repository("ssmall256/natten-mlx", "bb730764dfc1532add0431eccb472bc62c0a0bb7", "src"),
    Repository("vllm-project/vllm-metal", "211a1e4bc976cd6c0c961cad8da59d649ea9bd65", "src"),
    Repository("zakkeown/mlx-primitives", "5c35f6eba79380323cf29b3815a9d1faaa21c25b"),
)


def fetch(repository: Repository, into: Path, source: str = HUB) -> Path:
    """Check the repository out into a folder of `into`, unless it is there, and return that folder.

    Args:
        repository: what to fetch.
        into: the folder of all checkouts.
        source: where to clone from, with `{owner}` and `{name}`: a mirror has another address.
    """
    folder = into / repository.folder
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        owner, name = repository.path.split("/")
        _git(folder, "init", "--quiet")
        _git(folder, "remote", "add", "origin", source.format(owner=owner, name=name))
        _git(folder, "config", "remote.origin.promisor", "true")
        # Kernels are small: large files, such as models and videos, stay where they are.
        _git(folder, "fetch", "--quiet", "--depth", "1", "--filter=blob:limit=1m", "origin", repository.commit)
        _git(folder, "sparse-checkout", "set", "--no-cone", *SOURCES)
        _git(folder, "checkout", "--quiet", "--force", repository.commit)
    return folder


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True)
