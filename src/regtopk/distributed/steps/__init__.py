"""What a step consists of: ranks agree, the algorithm runs, the step is counted or taken back."""
