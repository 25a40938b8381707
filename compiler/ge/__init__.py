"""Graphs for an Ascend NPU: lowering to Graph Engine (GE) graphs, proofs about them, their execution."""
