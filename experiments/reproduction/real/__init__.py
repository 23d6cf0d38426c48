"""Two real language models: own answers, retrofits, and what every method keeps of them."""
