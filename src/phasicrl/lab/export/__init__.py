"""Export to other tools: policies, packages, the Hugging Face Hub."""
