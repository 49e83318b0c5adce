"""Networks: encoders, memory, heads and the agent they make up. Kind: state."""
