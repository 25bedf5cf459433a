// containerd-shim-runsc-v1 for machines on which root may not lower a process's OOM score.
//
// gVisor's own shim gives itself a low score and does not start when it may not. Containers, some
// CI machines and some VMs are like that, so here the one call that does it is ours; the rest of
// the shim is gVisor's.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/runtime/v2/shim"
	runsc "gvisor.dev/gvisor/pkg/shim"
)

// modest is gVisor's shim, without the wish to outlive everybody.
type modest struct{ shim.Shim }

func main() {
	shim.Run("io.containerd.runsc.v1", func(ctx context.Context, id string, publisher shim.Publisher, shutdown func()) (shim.Shim, error) {
		inner, err := runsc.New(ctx, id, publisher, shutdown)
		return modest{inner}, err
	})
}

// StartShim starts this program again as the server of one pod, and says where it listens.
func (modest) StartShim(ctx context.Context, opts shim.StartOpts) (string, error) {
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return "", err
	}
	address, err := shim.SocketAddress(ctx, opts.Address, opts.ID)
	if err != nil {
		return "", err
	}
	// Whatever is there is of a server that is gone: ids are not used twice.
	_ = shim.RemoveSocket(address)
	socket, err := shim.NewSocket(address)
	if err != nil {
		return "", fmt.Errorf("listen on %s: %w", address, err)
	}
	listening, err := socket.File()
	if err != nil {
		return "", err
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	server := exec.Command(self, "-namespace", namespace, "-address", opts.Address, "-publish-binary", opts.ContainerdBinary)
	server.ExtraFiles = []*os.File{listening}
	server.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := server.Start(); err != nil {
		_ = shim.RemoveSocket(address)
		return "", fmt.Errorf("start %s: %w", self, err)
	}
	// The next call finds the server by this file.
	if err := shim.WriteAddress("address", address); err != nil {
		_ = server.Process.Kill()
		return "", err
	}
	return address, nil
}
