"""Jobs on pods of a Kubernetes cluster, in the form of torchmonarch; ``monarch.job.KubernetesJob`` has more options."""

from __future__ import annotations

from monarch._session.torchmonarch.kubernetes_job import ImageSpec, KubeConfig, KubernetesJob

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
