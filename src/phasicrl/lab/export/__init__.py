"""What goes to other tools and comes from them: exported policies, packages, configurations."""
