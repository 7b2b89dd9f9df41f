"""The functions of each format as attributes of its name: `gguf.open(path)`, `hf.check(path)`.

The packages themselves import nothing until they are used.
"""

from types import SimpleNamespace

from polyquant.formats.gguf import check as gguf_check
from polyquant.formats.gguf import codes as gguf_codes
from polyquant.formats.gguf import dialect as gguf_dialect
from polyquant.formats.gguf import edit as gguf_edit
from polyquant.formats.gguf import header as gguf_header
from polyquant.formats.gguf import layout as gguf_layout
from polyquant.formats.gguf import reading as gguf_reading
from polyquant.formats.gguf import settings as gguf_settings
from polyquant.formats.gguf import values as gguf_values
from polyquant.formats.huggingface import check as hf_check
from polyquant.formats.huggingface import codes as hf_codes
from polyquant.formats.huggingface import folder as hf_folder
from polyquant.formats.huggingface import layout as hf_layout
from polyquant.formats.huggingface import open as hf_open
from polyquant.formats.msmodelslim import check as msmodelslim_check
from polyquant.formats.msmodelslim import codes as msmodelslim_codes
from polyquant.formats.msmodelslim import consumers as msmodelslim_consumers
from polyquant.formats.msmodelslim import folder as msmodelslim_folder
from polyquant.formats.msmodelslim import layout as msmodelslim_layout
from polyquant.formats.msmodelslim import open as msmodelslim_open
from polyquant.formats.trellis import check as trellis_check
from polyquant.formats.trellis import codes as trellis_codes
from polyquant.formats.trellis import folder as trellis_folder
from polyquant.formats.trellis import layout as trellis_layout
from polyquant.formats.trellis import open as trellis_open

gguf = SimpleNamespace(
    name="gguf",
    check=gguf_check.check,
    CODES=gguf_codes.CODES,
    DIALECTS=gguf_dialect.DIALECTS,
    Edited=gguf_edit.Edited,
    edit=gguf_edit.edit,
    Metadata=gguf_header.Metadata,
    lay_out=gguf_layout.lay_out,
    LAYOUTS=gguf_reading.LAYOUTS,
    sniff=gguf_reading.sniff,
    open=gguf_reading.open_gguf,
    KINDS=gguf_settings.KINDS,
    parse_setting=gguf_settings.parse_setting,
    NumberArray=gguf_values.NumberArray,
    StringArray=gguf_values.StringArray,
    plain=gguf_values.plain,
)
trellis = SimpleNamespace(
    name="trellis-v3",
    check=trellis_check.check,
    CODES=trellis_codes.CODES,
    own_files=trellis_folder.own_files,
    lay_out=trellis_layout.lay_out,
    open=trellis_open.open,
    sniff=trellis_open.sniff,
)
hf = SimpleNamespace(
    name="hf",
    check=hf_check.check,
    CODES=hf_codes.CODES,
    own_files=hf_folder.own_files,
    lay_out=hf_layout.lay_out,
    open=hf_open.open,
    sniff=hf_open.sniff,
)
msmodelslim = SimpleNamespace(
    name="msmodelslim",
    check=msmodelslim_check.check,
    CODES=msmodelslim_codes.CODES,
    check_target=msmodelslim_consumers.check_target,
    own_files=msmodelslim_folder.own_files,
    lay_out=msmodelslim_layout.lay_out,
    open=msmodelslim_open.open,
    sniff=msmodelslim_open.sniff,
)
