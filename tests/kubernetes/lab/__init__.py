"""A real Kubernetes 1.20 on one machine, for tests: three nodes that can be broken.

`python -m tests.kubernetes.lab up` starts it. Everything lives in namespaces of its own: each node
has its network, mounts, processes and host name, its containerd and its kubelet; the control plane
lives in a fourth, the hub. Nothing listens in the machine's own network. Times are seconds.
"""
