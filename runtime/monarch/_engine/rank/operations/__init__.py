"""Operations of the engine that are no ops of torch, and the state that they share with other ranks and actors."""
