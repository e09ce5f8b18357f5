"""A third party's backend: one record after another, in plain Python over tensors."""

import torch

from hyv4_kvdequant import FP8_DS_MLA, Features, GatherDequantBackend


class AcmeBackend(GatherDequantBackend):
    api_version = 1
    name = "acme"
    features = Features(request_dedup=True, graph_safe=False)

    @classmethod
    def unavailable_reasons(cls, target):
        reasons = []
        if target.device.type != "cpu":
            reasons.append(f"Acme serves CPUs only, not {target.device.type}")
        if target.layout != FP8_DS_MLA:
            reasons.append(f"Acme reads {FP8_DS_MLA.name} only, not {target.layout.name}")
        return reasons

    def gather_dequant(self, call):
        rows = call.compact_kv.view(torch.int16)
        first_row = {}
        for entry, slot in enumerate(call.topk_indices.flatten().tolist()):
            index = call.compact_indices.view(-1)[entry : entry + 1]
            if not 0 <= slot < call.num_slots:
                index.fill_(-1)
                rows[entry] = 0
                continue
            request = entry // (call.tokens_per_request * call.topk)
            key = (request, slot) if call.tokens_per_request > 1 else entry
            if key not in first_row:
                first_row[key] = entry
                rows[entry] = row_bits(call.kv_cache[slot // call.block_size, slot % call.block_size])
            index.fill_(first_row[key])


def row_bits(record):
    """A record (656,) uint8 as a row (576,) int16, the bits of bf16."""
    values = record[:512].view(torch.float8_e4m3fn).float()
    scale = record[512:528].view(torch.float32).repeat_interleave(128)
    return torch.cat([(values * scale).bfloat16().view(torch.int16), record[528:].view(torch.int16)])
