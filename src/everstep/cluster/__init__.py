"""Who owns machines: local stand-ins here; Slurm and Kubernetes come later."""
