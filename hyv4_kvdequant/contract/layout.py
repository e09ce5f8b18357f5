"""Record layouts: what of a record a backend reads it by. They are defined with their records."""

from hyv4_kvdequant.records import FP8_DS_MLA, LAYOUTS, RecordLayout

__all__ = ["FP8_DS_MLA", "LAYOUTS", "RecordLayout"]
