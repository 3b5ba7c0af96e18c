//! Metrics and where they are written: JSON lines, TensorBoard, the console.
