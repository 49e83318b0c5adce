"""How the arithmetic is executed: device, threads, precision, compiled steps."""
