"""Kinds of kernel lines that name a fault, besides NVIDIA's Xid and SXid."""
