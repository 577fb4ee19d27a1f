"""Containers as pods of a Kubernetes cluster."""
