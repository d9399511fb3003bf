"""Sets of questions for experiments: grounded, multiple-choice and labelled, from files, the hub, or Python itself."""
