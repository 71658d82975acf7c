"""On which kind of disk a folder lies, from an injected table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbtoolkit.search.mounts import file_system, is_far, local_folder

MOUNTS = """overlay / overlay rw 0 0
drive /content/drive fuse.drive rw 0 0
home /home/with\\040space nfs4 rw 0 0
/dev/sda1 /content/drive/local ext4 rw 0 0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(MOUNTS)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "kind", "far"),
    [
        ("/kaggle/working/x", "overlay", False),
        ("/content/drive/MyDrive/out", "fuse.drive", True),
        ("/content/drive/local/out", "ext4", False),
        ("/home/with space/out", "nfs4", True),
    ],
)
def test_a_folders_disk_is_known(root: Path, folder: str, kind: str, far: bool) -> None:
    assert file_system(Path(folder), root=root) == kind
    assert is_far(Path(folder), root=root) == far


def test_only_a_far_folder_needs_a_local_one(root: Path) -> None:
    far = Path("/content/drive/MyDrive/20261121T120000-sweep-0a1b")
    local = local_folder(far, root=root)
    assert local is not None
    assert local.name == far.name
    assert local_folder(Path("/kaggle/working/x"), root=root) is None
    assert file_system(Path("/x"), root=root / "nowhere") == ""
