"""The runtime's own decoder: layers, rotary embedding, weight loading."""
