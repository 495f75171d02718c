"""What the command does and a training job never imports: runs, experiments, reports and plans."""
