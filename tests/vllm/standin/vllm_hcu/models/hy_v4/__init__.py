"""Part of the stand-in for vllm_hcu; see hcu_sparse.py."""
