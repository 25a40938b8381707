"""What an Ascend NPU would execute: lowering to Graph Engine (GE) graphs, proofs about them, their execution."""
