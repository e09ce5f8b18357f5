"""The records of a KV cache, one file a record: its bytes, how values become bytes, what they mean, and what to test.

A record from elsewhere is one such file: it makes a `Record` and calls `register_record`. Imports nothing else of this
package.
"""

from hyv4_kvdequant.records.fp8_ds_mla import FP8_DS_MLA, make_record
from hyv4_kvdequant.records.layout import RecordLayout, put_parts, take_parts
from hyv4_kvdequant.records.record import LAYOUTS, RECORDS, Hostile, Record, register_record, unregister_record

__all__ = [
    "FP8_DS_MLA",
    "LAYOUTS",
    "RECORDS",
    "Hostile",
    "Record",
    "RecordLayout",
    "make_record",
    "put_parts",
    "record_of",
    "register_record",
    "take_parts",
    "unregister_record",
]


def record_of(layout: RecordLayout) -> Record:
    """The registered record of a layout; of one that nobody registered, `fp8_ds_mla`'s relative of its sizes.

    Raises:
        ValueError: nobody registered it, and its types are not those of `fp8_ds_mla`.
    """
    registered = RECORDS.get(layout.name)
    return registered if registered is not None and registered.layout == layout else make_record(layout)
