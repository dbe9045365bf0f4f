"""What a plan is made of: machines that need not be here, the programs of a run, and what their compilation says."""
