"""Take the node that follows another one into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from onnxport.graphs.passes.result import copy_model

Fuse = Callable[[onnx.NodeProto, onnx.NodeProto], onnx.NodeProto]


def take_in(
    model: onnx.ModelProto, followers: Mapping[str, onnx.NodeProto], fuse: Fuse
) -> onnx.ModelProto:
    """Return a copy of a graph in which one node stands for each of some pairs.

    Args:
        model: The graph; it stays as it is.
        followers: By the first output of a node, the one that follows it.
        fuse: Makes one of a node and its follower. It takes the place of the first one, so what
            it reads must be there by then.
    """
    copy = copy_model(model)
    if not followers:
        return copy
    dropped = {follower.output[0] for follower in followers.values()}
    del copy.graph.node[:]
    for node in model.graph.node:
        follower = followers.get(node.output[0])
        if follower is not None:
            copy.graph.node.append(fuse(node, follower))
        elif node.output[0] not in dropped:
            copy.graph.node.append(node)
    return copy
