"""Agreement of a rank with the others after a failure: progress, new process groups, tensors of replaced ranks."""
