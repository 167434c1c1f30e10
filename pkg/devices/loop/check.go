package loop

import (
	"context"
	"fmt"
	"os"
)

// Check returns an error when the node offers no loop devices any more.
func (b *Backend) Check(context.Context) error {
	if _, err := os.Stat(controlPath); err != nil {
		return fmt.Errorf("this node offers no loop devices: %w", err)
	}
	return nil
}
