"""Orders of sresctld that sresd carries out on its node."""
