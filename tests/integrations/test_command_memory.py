"""Peak memory of a folder that is loaded, compressed and saved, in a process of its own."""

import json
from pathlib import Path

import pytest
from commands import python
from model_folders import make_llama

if not Path("/proc/self/clear_refs").exists():
    pytest.skip("reads the peak from /proc", allow_module_level=True)

ROWS, COLS = 60_000, 256
# A small folder first: threads, and code that is loaded when it is first needed, do not count.
CHILD = """
import ctypes, gc, sys
import torch, tensorbed as tb
from pathlib import Path
from tensorbed.integrations.transformers.compressing import compress_folder

root, format = Path(sys.argv[1]), eval(sys.argv[2])
torch.set_num_threads(2)
compress_folder(root / "tiny", root / "first", format, min_rows=100)
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
status = lambda name: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(name)) * 1024
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
compress_folder(root / "large", root / "second", format)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["tb.HotRows()", "tb.LowRank(ratio=1.5)"])
def test_compressing_a_folder_holds_the_model_and_three_tables(tmp_path, format):
    make_llama(tmp_path / "tiny")
    make_llama(tmp_path / "large", vocab_size=ROWS, hidden_size=COLS)
    model = (tmp_path / "large" / "model.safetensors").stat().st_size
    result = python("-c", CHILD, tmp_path, format)
    assert result.returncode == 0, result.stderr
    extra, table = json.loads(result.stdout), ROWS * COLS * 4  # counted in float32
    assert model < extra <= model + 3 * table + 16e6, f"{extra / 1e6:.0f} MB, {extra / table:.2f} tables"
