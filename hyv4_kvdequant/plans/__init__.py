"""How a step gathers: every selected slot (`slot`), or each context slot once (`context`); and in what chunks."""
