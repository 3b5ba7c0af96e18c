//! The recipe: what the user asks for, as pure data.
