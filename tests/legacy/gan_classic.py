"""A classic GAN on two-dimensional points, one optimizer for each net."""
import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data
import torch.utils.data.distributed

parser = argparse.ArgumentParser()
parser.add_argument('outf', help='file for the weights of both nets')
parser.add_argument('--batchSize', type=int, default=12)
parser.add_argument('--nz', type=int, default=4, help='size of the latent z vector')
parser.add_argument('--ngf', type=int, default=12)
parser.add_argument('--ndf', type=int, default=12)
parser.add_argument('--niter', type=int, default=3, help='number of epochs')
parser.add_argument('--lr', type=float, default=0.002)
parser.add_argument('--beta1', type=float, default=0.5)
parser.add_argument('--manualSeed', type=int, default=17)
opt = parser.parse_args()

hvd.init()
torch.manual_seed(opt.manualSeed)
use_cuda = torch.cuda.is_available()
if use_cuda:
    torch.cuda.set_device(hvd.local_rank())
device = torch.device('cuda' if use_cuda else 'cpu')

angle = torch.rand(144, generator=torch.Generator().manual_seed(1)) * 6.28
dataset = torch.utils.data.TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler)


def weights_init(m):
    if m.__class__.__name__.find('Linear') != -1:
        m.weight.data.normal_(0.0, 0.2)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(
            nn.Linear(opt.nz, opt.ngf), nn.ReLU(True),
            nn.Linear(opt.ngf, opt.ngf), nn.ReLU(True),
            nn.Linear(opt.ngf, 2))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super(Discriminator, self).__init__()
        self.main = nn.Sequential(
            nn.Linear(2, opt.ndf), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(opt.ndf, opt.ndf), nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(opt.ndf, 1), nn.Sigmoid())

    def forward(self, x):
        return self.main(x).view(-1)


def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
criterion = nn.BCELoss()
noise_source = torch.Generator().manual_seed(opt.manualSeed + hvd.rank())

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

hvd.broadcast_parameters(netG.state_dict(), root_rank=0)
hvd.broadcast_parameters(netD.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizerG, root_rank=0)
hvd.broadcast_optimizer_state(optimizerD, root_rank=0)

# The discriminator has two backward passes a step: one of real points, one of fakes.
optimizerD = hvd.DistributedOptimizer(optimizerD, named_parameters=netD.named_parameters(prefix='netD'),
                                      backward_passes_per_step=2)
optimizerG = hvd.DistributedOptimizer(optimizerG, named_parameters=netG.named_parameters(prefix='netG'))

for epoch in range(opt.niter):
    sampler.set_epoch(epoch)
    for i, (real,) in enumerate(dataloader, 0):
        real = real.to(device)
        batch_size = real.size(0)

        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        set_requires_grad(netD, True)
        optimizerD.zero_grad()
        label = torch.full((batch_size,), 1.0, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, opt.nz, generator=noise_source).to(device)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z))); D only passes the gradient on
        set_requires_grad(netD, False)
        optimizerG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()

    if hvd.rank() == 0:
        print('[%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f'
              % (epoch + 1, opt.niter, errD.item(), errG.item(), D_x))

if hvd.rank() == 0:
    weights = {'netG.' + k: v for k, v in netG.state_dict().items()}
    weights.update({'netD.' + k: v for k, v in netD.state_dict().items()})
    torch.save(weights, opt.outf)
