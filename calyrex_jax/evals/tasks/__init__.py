"""Evaluation tasks, one a file, all with the interface of api.py; registry.py knows them by name."""
